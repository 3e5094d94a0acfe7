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
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy of that distribution.

    Args:
        hidden: [n, h], equal on all ranks of the TP group.
        weight: [V / tp, h], this rank's rows, padding at the end.
        targets: [n] int64 token ids.
        settings: see :class:`HeadSettings`.

    Returns:
        logprobs [n] and entropy [n], float32, equal on all ranks of the group, with gradient.
        n may be 0: the weight then gets a gradient of zeros, so that its hooks fire.

    Collectives over ``settings.group``: two all-reduces of [n] forward, one of [n, h] backward.
    """
    logprobs, entropy = LinearLogprobs.apply(hidden, weight, targets, settings)
    return logprobs, entropy


class LinearLogprobs(torch.autograd.Function):
    """Autograd of :func:`linear_logprobs`.

    With z = logits / temperature, p = softmax(z) and H = -sum p log p:
    d logprob / d z_j = [j is the target] - p_j and d H / d z_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor]:
        sums = _RunningSums(hidden)
        for block in _blocks(hidden, weight, targets, settings):
            sums.add(block)
        log_sum, logprobs, entropy = sums.finish(settings.group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy)
        ctx.settings = settings
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum, entropy = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        grad_logprobs = torch.zeros_like(log_sum) if grads[0] is None else grads[0]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for block in _blocks(hidden, weight, targets, settings):
            rows = block.rows
            grad_entropy = None if grads[1] is None else grads[1][rows, None]
            grad = _grad_logits(
                block, log_sum[rows, None], entropy[rows, None], grad_logprobs[rows], grad_entropy
            )
            _add_product(grad_hidden[rows], grad, block.weight)
            if grad_weight is not None:
                _add_product(grad_weight[block.columns], grad.t(), block.hidden)
        if settings.group is not None and len(hidden):
            torch.distributed.all_reduce(grad_hidden, group=settings.group)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows times some vocabulary columns."""

    rows: slice
    columns: slice  # of the local weight
    hidden: Tensor  # [r, h]
    weight: Tensor  # [c, h]
    hits: Tensor  # [k] rows of the block whose target is one of its columns
    hit_columns: Tensor  # [k] the columns of these targets, relative to the block
    logits: Tensor  # [r, c] float32, divided by the temperature; free to overwrite
    scratch: Tensor  # [r, c] float32, undefined
    temperature: float


def _blocks(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: HeadSettings
) -> Iterator[_Block]:
    """All blocks, columns outside, rows inside; ``logits`` and ``scratch`` are reused memory."""
    num_rows = len(hidden)
    dtype = torch.float32 if settings.fp32 else weight.dtype
    hidden = hidden.to(dtype)
    chunk_rows = min(settings.chunk_rows, num_rows)
    block_columns = min(settings.block_columns, settings.num_columns)
    memory = hidden.new_empty((2, chunk_rows * block_columns), dtype=torch.float32)
    for start in range(0, settings.num_columns if num_rows else 0, settings.block_columns):
        columns = slice(start, min(start + settings.block_columns, settings.num_columns))
        block_weight = weight[columns].to(dtype)
        local = targets - (settings.first_column + start)
        for first in range(0, num_rows, chunk_rows):
            rows = slice(first, min(first + chunk_rows, num_rows))
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            logits, scratch = (part[: shape[0] * shape[1]].view(shape) for part in memory)
            if dtype == torch.float32:
                torch.mm(hidden[rows], block_weight.t(), out=logits)
            else:
                logits.copy_(hidden[rows] @ block_weight.t())
            if settings.temperature != 1.0:
                logits.div_(settings.temperature)
            column = local[rows]
            hits = ((column >= 0) & (column < shape[1])).nonzero().squeeze(1)
            yield _Block(
                rows=rows,
                columns=columns,
                hidden=hidden[rows],
                weight=block_weight,
                hits=hits,
                hit_columns=column[hits],
                logits=logits,
                scratch=scratch,
                temperature=settings.temperature,
            )


class _RunningSums:
    """Softmax statistics per row over the blocks seen so far.

    With m the maximum logit: ``total`` = sum exp(z - m), ``weighted`` = sum (z - m) exp(z - m),
    ``target`` = the target's logit, 0 until its block was seen.
    """

    def __init__(self, hidden: Tensor) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "device": hidden.device}
        num_rows = len(hidden)
        # Finite, so that "no block yet" needs no case of its own: 0 * lowest is 0, not NaN.
        self.maximum = torch.full((num_rows,), torch.finfo(torch.float32).min, **options)
        self.total = torch.zeros(num_rows, **options)
        self.weighted = torch.zeros(num_rows, **options)
        self.target = torch.zeros(num_rows, **options)

    def add(self, block: _Block) -> None:
        """Overwrites the block's memory."""
        rows, logits = block.rows, block.logits
        self.target[rows].index_copy_(0, block.hits, logits[block.hits, block.hit_columns])
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

    def finish(self, group: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(log sum exp z [n], logprobs [n], entropy [n]) over the columns of all ranks."""
        if group is not None and len(self.maximum):
            maximum = self.maximum.clone()
            torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
            self._raise_maximum(slice(None), maximum)
            sums = torch.stack([self.total, self.weighted, self.target])
            torch.distributed.all_reduce(sums, group=group)
            self.total, self.weighted, self.target = sums.unbind()
        log_total = self.total.log()
        log_sum = self.maximum + log_total
        return log_sum, self.target - log_sum, log_total - self.weighted / self.total


def _grad_logits(
    block: _Block,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """[r, c] gradient of the undivided logits, in the block's memory. Others are [r, 1] or [r]."""
    log_p = block.logits.sub_(log_sum)
    grad = torch.exp(log_p, out=block.scratch)
    if grad_entropy is None:
        grad.mul_(-grad_logprobs[:, None])
    else:
        constant = torch.addcmul(grad_logprobs[:, None], grad_entropy, entropy)
        grad.mul_(log_p.mul_(grad_entropy).add_(constant).neg_())
    grad[block.hits, block.hit_columns] += grad_logprobs[block.hits]
    return grad.div_(block.temperature) if block.temperature != 1.0 else grad


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left @ right, the product in ``right``'s dtype; ``target`` is a float32 view."""
    if right.dtype == torch.float32:
        target.addmm_(left, right)
    else:
        target.add_(left.to(right.dtype) @ right)
