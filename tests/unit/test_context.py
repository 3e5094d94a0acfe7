"""Sequences cut over context-parallel ranks: nothing lost, nothing twice, the same attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.mcore.context import cut, zigzag_rows
from rlhf.mcore.stream import keep_whole
from rlhf.types import MicroBatch
from tests.unit.test_stream import micro_batches


def _padded(micro: MicroBatch, multiple: int) -> MicroBatch:
    """``micro`` with each sequence padded."""
    lengths = micro.cu_seqlens.diff().tolist()
    padded = [n + -n % multiple for n in lengths]
    borders = torch.tensor([0, *padded]).cumsum(0).int()
    real = torch.cat([torch.arange(n) + b for n, b in zip(lengths, borders.tolist(), strict=False)])
    tokens = torch.zeros(int(borders[-1]), dtype=torch.long)
    mask = torch.zeros(int(borders[-1]), dtype=torch.bool)
    tokens[real], mask[real] = micro.tokens, micro.mask
    positions = torch.cat([torch.arange(n) for n in padded])
    return MicroBatch(tokens, positions, mask, borders, {})


@st.composite
def cut_micro_batches(draw):
    """(micro-batch, cp, the streams of all ranks)."""
    cp = draw(st.sampled_from([2, 3, 4]))
    micro = _padded(draw(micro_batches()), 2 * cp * draw(st.sampled_from([1, 2])))
    short = draw(st.sampled_from([0, 16, 1000]))
    return micro, cp, [cut(micro, cp, rank, short) for rank in range(cp)]


def _held(micro, cp):
    return [zigzag_rows(micro.cu_seqlens.tolist(), cp, rank) for rank in range(cp)]


@settings(max_examples=50, deadline=None)
@given(case=cut_micro_batches())
def test_every_row_is_on_one_rank_with_its_token_and_position(case):
    micro, cp, streams = case
    held = _held(micro, cp)
    assert sorted(itertools.chain(*held)) == list(range(len(micro.tokens)))
    for rows, stream in zip(held, streams, strict=True):
        assert len(rows) == len(micro.tokens) // cp
        assert torch.equal(stream.tokens[0], micro.tokens[rows])
        assert torch.equal(stream.packed.positions, micro.positions[rows])


@settings(max_examples=50, deadline=None)
@given(case=cut_micro_batches())
def test_every_output_is_made_once_from_its_row(case):
    micro, cp, streams = case
    whole = keep_whole(micro)
    assert torch.equal(sum(s.made_here.int() for s in streams), torch.ones(len(whole.source)).int())
    for rows, stream in zip(_held(micro, cp), streams, strict=True):
        assert torch.equal(stream.targets, whole.targets[stream.made_here])
        expected = whole.needed[whole.source][stream.made_here]
        assert torch.equal(torch.tensor(rows)[stream.needed[stream.source]], expected)


@settings(max_examples=50, deadline=None)
@given(case=cut_micro_batches())
def test_every_row_attends_its_sequence_up_to_itself(case):
    micro, cp, streams = case
    held = _held(micro, cp)
    gathered = list(itertools.chain(*held))
    for rows, stream in zip(held, streams, strict=True):
        seen = []
        for group in stream.packed.groups:
            keys = group.keys.view(group.num_paths, -1)
            for path, queries in enumerate(group.queries.view(group.num_paths, -1).tolist()):
                for number in range(len(queries)):
                    visible = keys[path][~group.hidden[path, 0, number]].tolist()
                    seen.append(sorted(gathered[key] for key in visible))
        for row, at in zip(rows, stream.packed.place.tolist(), strict=True):
            start = max(b for b in micro.cu_seqlens.tolist() if b <= row)
            assert seen[at] == list(range(start, row + 1))


def test_transformer_engine_gets_the_borders_of_the_whole_sequences():
    borders = torch.tensor([0, 8, 12], dtype=torch.int32)
    micro = MicroBatch(
        torch.arange(12), torch.arange(12), torch.zeros(12, dtype=torch.bool), borders, {}
    )
    stream = cut(micro, 2, 1, None)
    assert stream.tokens.tolist() == [[2, 3, 4, 5, 9, 10]]
    packed = stream.packed
    for given_borders in (packed.cu_seqlens_q, packed.cu_seqlens_q_padded):
        assert torch.equal(given_borders, borders)
    for given_borders in (packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded):
        assert torch.equal(given_borders, borders)
    assert packed.max_seqlen_q == 8
    assert packed.positions.tolist() == [2, 3, 4, 5, 9, 10]


def test_a_sequence_that_is_not_padded_is_refused():
    borders = torch.tensor([0, 8, 14], dtype=torch.int32)
    micro = MicroBatch(
        torch.arange(14), torch.arange(14), torch.zeros(14, dtype=torch.bool), borders, {}
    )
    with pytest.raises(AssertionError, match=r"6 rows must be padded to a multiple of 2\*cp=4"):
        cut(micro, 2, 0, 0)
