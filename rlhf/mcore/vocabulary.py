"""The two ends of the model, both cut over the vocabulary: embedding and head.

They take over the weights of megatron's modules, so parameter names stay megatron's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from rlhf.mcore.logprobs import HeadSettings, linear_logprobs
from rlhf.mcore.stream import Stream
from rlhf.mcore.weight_grad import WeightGradient


class _VocabularyModule(torch.nn.Module):
    """A weight whose rows are token ids, cut over TP; None: the other end holds it."""

    def __init__(self, weight: torch.nn.Parameter | None, tp_group: Any) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.tp_group = tp_group

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight; another tp may pad the vocabulary to another size."""
        if self.weight is None:
            return {}
        assert metadata is not None
        name = f"{prefix}weight"
        tensor = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.weight,
            key=name,
            allow_shape_mismatch=True,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return {name: tensor}


class TokenEmbedding(_VocabularyModule):
    """Token ids [1, S] to vectors: [1, S, h], or under sequence parallelism [S / tp, 1, h]."""

    def __init__(self, old: VocabParallelEmbedding) -> None:
        super().__init__(old.weight, old.tp_group)
        self.reduce_scatter_embeddings = old.reduce_scatter_embeddings
        self._first, self._stop = old.vocab_start_index, old.vocab_end_index
        # Set for a weight that is also the head on this stage, whose embedding part goes through
        # autograd. Ours does not.
        self.weight.zero_out_wgrad = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Collective over TP: each rank knows its own tokens, the sum knows all."""
        if self.tp_group.size() == 1:
            return Lookup.apply(self.weight, tokens, None)
        inside = (tokens >= self._first) & (tokens < self._stop)
        local = torch.where(inside, tokens - self._first, 0)
        out = Lookup.apply(self.weight, local, inside)
        if self.reduce_scatter_embeddings:
            out = out.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(out, group=self.tp_group)


class Lookup(torch.autograd.Function):
    """weight[rows], zero where ``inside`` is False; the gradient touches these rows only."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, inside: Tensor | None) -> Tensor:
        ctx.parameter, ctx.rows, ctx.inside = weight, rows, inside
        out = torch.nn.functional.embedding(rows, weight)
        return out if inside is None else out.mul_(inside[..., None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        grad_weight = WeightGradient(ctx.parameter)
        grad = grads[0].to(torch.float32)
        if ctx.inside is not None:
            grad = grad * ctx.inside[..., None]
        grad_weight.sum.index_add_(0, ctx.rows.flatten(), grad.flatten(0, -2))
        return grad_weight.finish(), None, None


class LogprobHead(_VocabularyModule):
    """Hidden states of the last stage to log-probabilities and entropy."""

    def __init__(
        self, old: ColumnParallelLinear, vocab_size: int, chunk_rows: int, fp32: bool
    ) -> None:
        super().__init__(old.weight, old.tp_group)
        self.sequence_parallel = old.sequence_parallel
        rows = old.output_size_per_partition
        first = self.tp_group.rank() * rows
        self._settings = partial(
            HeadSettings,
            first_column=first,
            num_columns=max(0, min(rows, vocab_size - first)),
            chunk_rows=chunk_rows,
            fp32=fp32,
            group=self.tp_group if self.tp_group.size() > 1 else None,
        )

    def forward(
        self, hidden: Tensor, stream: Stream, temperature: float, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """hidden [S or S / tp, 1, h] to (logprobs [n], entropy [n]), float32.

        ``weight``: the embedding of this stage if it is tied and this module has none of its own.
        Collectives over TP: those of :func:`linear_logprobs`, and under sequence parallelism a
        gather of the hidden states.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return linear_logprobs(
            hidden.squeeze(1).index_select(0, stream.needed),
            self.weight if weight is None else weight,
            stream.source,
            stream.targets,
            self._settings(temperature=temperature),
        )
