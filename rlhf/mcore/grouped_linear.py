"""The linear layers of a rank's experts, with TE's parameter names: weight0, weight1, ..."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rlhf.mcore.weight_grad import WeightGradient, add_product


class GroupedLinear(torch.nn.Module):
    """One weight per expert of this rank; rows come sorted by expert. No collectives."""

    cut: ClassVar[Literal[0, 1]]  # dim of a weight that is cut over the expert TP ranks

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.num_experts = num_gemms
        self._groups = pg_collection
        sizes = [output_size, input_size]
        sizes[self.cut] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(*sizes, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            set_tensor_model_parallel_attributes(weight, True, self.cut, 1)
            # Megatron sums its gradient over the ranks that hold the same experts.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """x [rows, in], the first ``tokens_per_expert[0]`` rows for the first expert."""
        weights = [getattr(self, f"weight{i}") for i in range(self.num_experts)]
        return GroupedProduct.apply(x, tokens_per_expert, *weights), None

    def backward_dw(self) -> None:
        """Nothing is put off; megatron's experts ask each of their layers."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """All experts of all ranks are one tensor [experts, out, in] in a checkpoint."""
        assert metadata is not None
        groups, out = self._groups, {}
        num_experts = groups.ep.size() * self.num_experts
        for i in range(self.num_experts):
            number = groups.ep.rank() * self.num_experts + i
            shards = make_sharded_tensors_for_checkpoint(
                {f"{i}.weight": getattr(self, f"weight{i}")},
                "",
                {f"{i}.weight": self.cut},
                (*sharded_offsets, (len(sharded_offsets), number, num_experts)),
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(shards, f"{i}.", prefix)
            shard = shards[f"{i}.weight"]
            shard.replica_id = (*shard.replica_id[:2], groups.expt_dp.rank())
            out[f"{prefix}weight{i}"] = shard
        return out


class ColumnGroupedLinear(GroupedLinear):
    """Cut over its outputs."""

    cut = 0


class RowGroupedLinear(GroupedLinear):
    """Cut over its inputs; the dispatcher sums the parts."""

    cut = 1


class GroupedProduct(torch.autograd.Function):
    """Blocks of rows, each times its own weight transposed.

    A weight without rows gets a gradient of zeros all the same: hooks wait for every weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sizes, ctx.weights = sizes, weights
        out = x.new_empty(len(x), weights[0].shape[0])
        for rows, target, weight in zip(x.split(sizes), out.split(sizes), weights, strict=True):
            torch.mm(rows, weight.t(), out=target)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        blocks = grads[0].contiguous().split(ctx.sizes)
        grad_x = torch.empty_like(x)
        for block, target, weight in zip(blocks, grad_x.split(ctx.sizes), ctx.weights, strict=True):
            torch.mm(block, weight, out=target)
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *[None] * len(ctx.weights)
        grad_weights = []
        for block, rows, weight in zip(blocks, x.split(ctx.sizes), ctx.weights, strict=True):
            gradient = WeightGradient(weight)
            if len(rows):
                add_product(gradient.sum, block.t(), rows)
            grad_weights.append(gradient.finish())
        return grad_x, None, *grad_weights
