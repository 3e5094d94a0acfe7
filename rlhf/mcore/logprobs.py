"""Log-probabilities and entropy from hidden states, without the matrix of logits.

The logits of n tokens over a vocabulary of V are never whole: forward and backward walk over blocks
of vocabulary columns and chunks of rows, and the backward pass computes each block again. Under TP
every rank holds V / tp columns; the group meets twice in the forward pass (maximum, then sums) and
once in the backward pass (gradient of the hidden states).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.mcore.weight_grad import WeightGradient, add_product


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How a head turns hidden states into log-probabilities.

    ``temperature`` divides the logits. The local weight holds the token ids from ``first_column``
    on; rows from ``num_columns`` on are padding of the vocabulary and take no part. ``fp32``:
    matrix products in float32, otherwise in the weight's dtype; all else is float32. A block of
    ``chunk_rows`` x ``block_columns`` logits exists at one time.
    """

    temperature: float
    first_column: int
    num_columns: int
    chunk_rows: int
    fp32: bool
    block_columns: int = 8192
    group: Any = None  # TP process group; None: this rank holds the whole vocabulary


def linear_logprobs(
    hidden: Tensor, weight: Tensor, source: Tensor, targets: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden[source] @ weight.T / temperature)[target], and the entropy of it.

    Args:
        hidden: [u, h], equal on all ranks of the TP group.
        weight: [V / tp, h], this rank's rows, padding at the end.
        source: [n] int64, the row of ``hidden`` for each target; rows may serve many.
        targets: [n] int64 token ids.
        settings: see :class:`HeadSettings`.

    Returns:
        logprobs [n] and entropy [n], float32, equal on all ranks of the group, with gradient.
        n may be 0: the weight then gets a gradient of zeros, so that its hooks fire.

    Collectives over ``settings.group``: two small all-reduces forward, one of [u, h] backward.
    """
    logprobs, entropy = LinearLogprobs.apply(hidden, weight, source, targets, settings)
    return logprobs, entropy


class LinearLogprobs(torch.autograd.Function):
    """Autograd of :func:`linear_logprobs`.

    With z = logits / temperature, p = softmax(z) and H = -sum p log p:
    d logprob / d z_j = [j is the target] - p_j and d H / d z_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        source: Tensor,
        targets: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, source, targets, settings)
        sums = _RunningSums(head)
        for block in head.blocks():
            sums.add(block)
        log_sum, logprobs, entropy = sums.finish()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, source, targets, log_sum, entropy)
        ctx.settings = settings
        ctx.parameter = weight  # saved tensors lose the gradient buffer that hangs on it
        return logprobs, entropy[source]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, source, targets, log_sum, entropy = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        head = _Head(hidden, weight, source, targets, settings)
        grad_logprobs = targets.new_zeros(len(targets), dtype=torch.float32)
        if grads[0] is not None:
            grad_logprobs += grads[0]
        # rows serve several targets: their gradients add up
        row_grad = torch.zeros_like(log_sum).index_add_(0, source, grad_logprobs)
        row_grad_entropy = None
        if grads[1] is not None:
            row_grad_entropy = torch.zeros_like(log_sum).index_add_(0, source, grads[1])
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = WeightGradient(ctx.parameter) if ctx.needs_input_grad[1] else None
        for block in head.blocks():
            rows = block.rows
            to_rows = None if row_grad_entropy is None else row_grad_entropy[rows, None]
            grad = _grad_logits(
                block, log_sum[rows, None], entropy[rows, None], row_grad[rows, None], to_rows
            )
            block.add_at_targets(grad, grad_logprobs)
            if settings.temperature != 1.0:
                grad.div_(settings.temperature)
            add_product(grad_hidden[rows], grad, block.weight)
            if grad_weight is not None:
                add_product(grad_weight.sum[block.columns], grad.t(), block.hidden)
        if settings.group is not None and len(hidden):
            torch.distributed.all_reduce(grad_hidden, group=settings.group)
        to_autograd = None if grad_weight is None else grad_weight.finish()
        return grad_hidden.to(hidden.dtype), to_autograd, None, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows times some vocabulary columns."""

    rows: slice
    columns: slice  # of the local weight
    hidden: Tensor  # [r, h]
    weight: Tensor  # [c, h]
    target_row: Tensor  # [n] row in the block, any number outside if not here
    target_column: Tensor  # [n] likewise
    target_here: Tensor  # [n] bool
    logits: Tensor  # [r, c] float32, divided by the temperature; free to overwrite
    scratch: Tensor  # [r, c] float32, undefined

    def take_targets(self, known: Tensor) -> Tensor:
        """[n]: the logits of targets in this block, ``known`` for all others."""
        inside = self.logits[self.target_row, self.target_column]
        return torch.where(self.target_here, inside, known)

    def add_at_targets(self, grad: Tensor, values: Tensor) -> None:
        """Add ``values`` [n] to ``grad`` [r, c] where targets are."""
        values = torch.where(self.target_here, values, 0.0)
        grad.index_put_((self.target_row, self.target_column), values, accumulate=True)


class _Head:
    """Hidden states, weight and targets, and the walk over them."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        source: Tensor,
        targets: Tensor,
        settings: HeadSettings,
    ) -> None:
        self.dtype = torch.float32 if settings.fp32 else weight.dtype
        self.hidden = hidden.to(self.dtype)
        self.weight = weight
        self.source = source
        self.targets = targets
        self.settings = settings

    def blocks(self) -> Iterator[_Block]:
        """All blocks, columns outside, rows inside; a block's memory is reused by the next."""
        how, num_rows = self.settings, len(self.hidden)
        chunk_rows = min(how.chunk_rows, num_rows)
        size = chunk_rows * min(how.block_columns, how.num_columns)
        memory = self.hidden.new_empty((2, size), dtype=torch.float32)
        for start in range(0, how.num_columns if num_rows else 0, how.block_columns):
            columns = slice(start, min(start + how.block_columns, how.num_columns))
            weight = self.weight[columns].to(self.dtype)
            for first in range(0, num_rows, chunk_rows):
                rows = slice(first, min(first + chunk_rows, num_rows))
                yield self._block(rows, columns, weight, memory)

    def _block(self, rows: slice, columns: slice, weight: Tensor, memory: Tensor) -> _Block:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        logits, scratch = (part[: shape[0] * shape[1]].view(shape) for part in memory)
        hidden = self.hidden[rows]
        if self.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            logits.copy_(hidden @ weight.t())
        if self.settings.temperature != 1.0:
            logits.div_(self.settings.temperature)
        row = self.source - rows.start
        column = self.targets - (self.settings.first_column + columns.start)
        here = (row >= 0) & (row < shape[0]) & (column >= 0) & (column < shape[1])
        return _Block(
            rows=rows,
            columns=columns,
            hidden=hidden,
            weight=weight,
            target_row=row.clamp(0, shape[0] - 1),
            target_column=column.clamp(0, shape[1] - 1),
            target_here=here,
            logits=logits,
            scratch=scratch,
        )


class _RunningSums:
    """Softmax statistics per row over the blocks seen so far.

    With m the maximum logit: ``total`` = sum exp(z - m), ``weighted`` = sum (z - m) exp(z - m),
    ``target`` = each target's logit, 0 until its block was seen.
    """

    def __init__(self, head: _Head) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "device": head.hidden.device}
        num_rows = len(head.hidden)
        # Finite, so that "no block yet" needs no case of its own: 0 * lowest is 0, not NaN.
        self.maximum = torch.full((num_rows,), torch.finfo(torch.float32).min, **options)
        self.total = torch.zeros(num_rows, **options)
        self.weighted = torch.zeros(num_rows, **options)
        self.target = torch.zeros(len(head.targets), **options)
        self._head = head

    def add(self, block: _Block) -> None:
        """Overwrites the block's memory."""
        rows, logits = block.rows, block.logits
        self.target = block.take_targets(self.target)
        self._raise_maximum(rows, torch.maximum(self.maximum[rows], logits.amax(1)))
        shifted = logits.sub_(self.maximum[rows, None])
        weights = torch.exp(shifted, out=block.scratch)
        self.total[rows] += weights.sum(1)
        self.weighted[rows] += shifted.mul_(weights).sum(1)

    def _raise_maximum(self, rows: slice, maximum: Tensor) -> None:
        shift = self.maximum[rows] - maximum
        factor = shift.exp()
        self.weighted[rows] = (self.weighted[rows] + shift * self.total[rows]) * factor
        self.total[rows] *= factor
        self.maximum[rows] = maximum

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(log sum exp z [u], logprobs [n], entropy [u]) over the columns of all ranks."""
        group = self._head.settings.group
        num_rows = len(self.maximum)
        if group is not None and num_rows:
            maximum = self.maximum.clone()
            torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
            self._raise_maximum(slice(None), maximum)
            sums = torch.cat([self.total, self.weighted, self.target])
            torch.distributed.all_reduce(sums, group=group)
            self.total, self.weighted, self.target = sums.split(
                [num_rows, num_rows, len(self.target)]
            )
        log_total = self.total.log()
        log_sum = self.maximum + log_total
        entropy = log_total - self.weighted / self.total
        return log_sum, self.target - log_sum[self._head.source], entropy


def _grad_logits(
    block: _Block,
    log_sum: Tensor,
    entropy: Tensor,
    row_grad: Tensor,
    row_grad_entropy: Tensor | None,
) -> Tensor:
    """[r, c] gradient of z without the targets' own term, in the block's memory; others [r, 1]."""
    log_p = block.logits.sub_(log_sum)
    grad = torch.exp(log_p, out=block.scratch)
    if row_grad_entropy is None:
        return grad.mul_(-row_grad)
    constant = torch.addcmul(row_grad, row_grad_entropy, entropy)
    return grad.mul_(log_p.mul_(row_grad_entropy).add_(constant).neg_())
