"""Layers of routed experts: megatron's dispatchers and experts behind our router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from rlhf.config.schema import ExpertsSection
from rlhf.mcore.router import ExpertRouter
from rlhf.weights.model_shape import MoEShape


def expert_layer_spec(
    moe: MoEShape, settings: ExpertsSection, shared: MLPSubmodules, grouped: MLPSubmodules
) -> Any:
    """What a decoder layer has in place of its MLP.

    Not a ModuleSpec, which would do the same: megatron warns of module classes unknown to it.
    """
    return SimpleNamespace(
        module=ExpertLayer,
        params={},
        submodules=MoESubmodules(
            experts=ModuleSpec(module=TEGroupedMLP, submodules=grouped),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
            router=partial(ExpertRouter, moe=moe, settings=settings),
        ),
    )


class ExpertLayer(MoELayer):
    """Router, dispatch, experts of this rank, combine; plus the shared experts."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> tuple[Tensor, None]:
        """hidden_states [rows, 1, h] to the same.

        ``padding_mask``: the only argument per row that megatron brings here; ours is
        ``Stream.members`` of these rows. Collective over the ranks of ep and etp: the dispatch.
        """
        shared = self.shared_experts_compute(hidden_states)
        weights, chosen = self.router(hidden_states, padding_mask)
        num_rows = len(hidden_states)
        if self.config.moe_token_dispatcher_type == "allgather":
            added = self._missing_rows(num_rows)
            hidden_states = F.pad(hidden_states, (0, 0, 0, 0, 0, added))
            weights, chosen = F.pad(weights, (0, 0, 0, added)), F.pad(chosen, (0, 0, 0, added))
        inputs, weights = self.token_dispatcher.dispatch_preprocess(hidden_states, chosen, weights)
        inputs, weights = self.dispatch(inputs, weights)
        output, _ = self.routed_experts_compute(inputs, weights)
        output = self.postprocess(self.combine(output), None)[:num_rows]
        return (output if shared is None else output + shared), None

    def _missing_rows(self, num_rows: int) -> int:
        """Rows that some other rank of the dispatch has more: all must bring as many."""
        most = torch.tensor(num_rows, device=torch.cuda.current_device())
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(most) - num_rows


def routers(decoders: Sequence[torch.nn.Module]) -> Iterator[ExpertRouter]:
    """Those on this rank, in the order of the layers of each chunk."""
    for decoder in decoders:
        for module in decoder.modules():
            if isinstance(module, ExpertRouter):
                yield module


def begin_update(decoders: Sequence[torch.nn.Module], members: list[Tensor], copies: int) -> None:
    """Tell the routers how many tokens and sequences the next update has on all ranks.

    ``members``: of this rank's micro-batches; each sequence is on ``copies`` ranks, each of which
    has a part of its rows. Collective over data parallel ranks.
    """
    totals = torch.tensor(
        [sum(int(m.sum()) for m in members), sum(len(m) for m in members) / copies],
        dtype=torch.float64,
        device=torch.cuda.current_device(),
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(totals, group=group)
    tokens, sequences = totals.clamp(min=1).tolist()
    for router in routers(decoders):
        router.begin_update(tokens, sequences)


def expert_loads(decoders: Sequence[torch.nn.Module], num_layers: int, num_experts: int) -> Tensor:
    """[layers, experts] float64: tokens that each expert saw in this update, zero in dense layers.

    A token counts in each sequence that it is in. Equal on all ranks; collective over all of them.
    """
    loads = torch.zeros(num_layers, num_experts, dtype=torch.float64)
    loads = loads.to(torch.cuda.current_device())
    for router in routers(decoders):
        loads[router.layer_number - 1] = router.loads
    for group in (
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        torch.distributed.all_reduce(loads, group=group)
    return loads.cpu()


def update_biases(
    decoders: Sequence[torch.nn.Module], loads: Tensor, settings: ExpertsSection
) -> None:
    """Expert biases after an update: a step towards even loads, then the decay.

    arXiv:2408.15664, Algorithm 1. The same on all ranks that hold a bias.
    """
    if not settings.bias_update_rate and not settings.bias_decay:
        return
    for router in routers(decoders):
        if router.expert_bias is None:
            continue
        load = loads[router.layer_number - 1].to(router.expert_bias.device)
        step = (load.mean() - load).sign().float() * settings.bias_update_rate
        router.expert_bias.add_(step).mul_(1 - settings.bias_decay)
