"""The end of a model that values states instead of predicting tokens: critic and reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rlhf.mcore.stream import Stream


def draw_head(params: Mapping[str, Tensor], std: float, seed: int) -> None:
    """Fill a new head, where this rank has one, from a normal distribution; alike on all ranks."""
    for name, weight in params.items():
        if name.endswith("output_layer.weight"):
            generator = torch.Generator().manual_seed(seed)
            weight.data.copy_(std * torch.randn(weight.shape, generator=generator))


class ValueHead(torch.nn.Module):
    """Hidden states of the last stage to one number each; the weight is whole on every TP rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        weight = torch.zeros(
            1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight: Any = torch.nn.Parameter(weight)
        # each TP rank then has the gradient of its own rows; megatron adds them up
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(
        self, hidden: Tensor, stream: Stream, temperature: float, weight: None = None
    ) -> tuple[Tensor]:
        """hidden [S or S / tp, 1, h] to (values [n],), float32; n = ``len(stream.source)``.

        The same call as a :class:`LogprobHead`'s; a value has no temperature and shares no weight.
        Under sequence parallelism a gather of [S] numbers over TP.
        """
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return (values.flatten().index_select(0, stream.needed)[stream.source],)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight, written by one rank of those that hold it."""
        assert metadata is not None
        whole: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return whole
