"""Context parallelism: the rows of each sequence are spread over ranks, in zigzag.

Every sequence is cut in 2 * cp equal chunks and rank r holds chunks r and 2 * cp - 1 - r, as
transformer-engine's attention has it for packed sequences: late tokens attend many others and early
ones few, so all ranks have equal work. Only attention and the loss see other ranks' rows. Sequences
stay whole here: beginnings that samples share are computed once per sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from rlhf.mcore.core_attention import PackedSequences, batch_cut_sequences
from rlhf.mcore.stream import Stream, keep_whole
from rlhf.types import MicroBatch


def zigzag_rows(borders: Sequence[int], cp: int, rank: int) -> list[int]:
    """The rows that ``rank`` holds of sequences between ``borders``, sequence after sequence.

    Raises:
        AssertionError: a sequence is not padded to a multiple of 2 * cp.
    """
    rows: list[int] = []
    for start, stop in itertools.pairwise(borders):
        length = stop - start
        assert length % (2 * cp) == 0, (
            f"a sequence of {length} rows must be padded to a multiple of 2*cp={2 * cp}"
        )
        chunk = length // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            rows += range(start + number * chunk, start + (number + 1) * chunk)
    return rows


def cut(
    micro: MicroBatch, cp: int, rank: int, short: int | None, asked: Tensor | None = None
) -> Stream:
    """The part of ``micro`` that ``rank`` of the context-parallel group runs.

    ``short``: see :func:`batch_cut_sequences`; None: transformer-engine attends, which takes the
    borders of the whole sequences. ``asked``: see :func:`rlhf.mcore.stream.fold`.
    """
    whole = keep_whole(micro, asked)
    borders, device = micro.cu_seqlens.tolist(), micro.tokens.device
    held = [torch.tensor(zigzag_rows(borders, cp, r)) for r in range(cp)]
    rows = held[rank].to(device)
    positions = micro.positions[rows]
    local = torch.full_like(micro.tokens, -1)
    local[rows] = torch.arange(len(rows), device=device)
    needed = local[whole.needed[whole.source]]
    made_here = needed >= 0
    return Stream(
        tokens=whole.tokens[:, rows],
        packed=_for_transformer_engine(whole.packed, positions)
        if short is None
        else batch_cut_sequences(borders, held, rank, positions, short),
        needed=needed[made_here],
        source=torch.arange(int(made_here.sum()), device=device),
        targets=whole.targets[made_here],
        members=whole.members[:, rows],
        made_here=made_here,
    )


def _for_transformer_engine(packed: PackedSequences, positions: Tensor) -> PackedSequences:
    """It wants the borders in memory too; they are the same, since padding counts as a part."""
    return replace(
        packed,
        positions=positions,
        cu_seqlens_q_padded=packed.cu_seqlens_q,
        cu_seqlens_kv_padded=packed.cu_seqlens_kv,
    )


def join_outputs(outputs: tuple[Tensor, ...], made_here: Tensor, group: Any) -> tuple[Tensor, ...]:
    """The head's outputs for the whole micro-batch, on every rank of the group.

    Args:
        outputs: [k] each, those that this rank made.
        made_here: [n] bool, k of them True.

    Returns:
        [n] each. Every rank computes the same loss of them, and gets the gradient of its own ones.

    Collective over the context-parallel group: one all-reduce forward, nothing backward.
    """
    whole = spread(torch.stack(outputs), made_here)
    return reduce_from_tensor_model_parallel_region(whole, group=group).unbind(0)


def spread(own: Tensor, made_here: Tensor) -> Tensor:
    """[..., k] at its places among [..., n], zero elsewhere; ``made_here`` [n] bool."""
    whole = own.new_zeros(*own.shape[:-1], len(made_here))
    return whole.index_copy(-1, made_here.nonzero().squeeze(1), own)
