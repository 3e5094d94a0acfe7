"""The folded micro-batch holds what the trained tokens need, once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.mcore.stream import fold, keep_whole
from rlhf.types import MicroBatch


@st.composite
def micro_batches(draw):
    """Sequences over three tokens, so that beginnings are often shared; any subset is trained."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    total = sum(lengths)
    tokens = draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    mask = torch.tensor(mask)
    mask[borders[:-1].long()] = False
    return MicroBatch(
        tokens=torch.tensor(tokens),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        mask=mask,
        cu_seqlens=borders,
        columns={},
    )


def _history(micro, index):
    """Tokens of the sequence of ``index`` before it."""
    start = max(b for b in micro.cu_seqlens.tolist() if b <= index)
    return tuple(micro.tokens[start:index].tolist())


def _path_of(stream, row):
    """Tokens from the root to ``row``."""
    for group in stream.packed.groups:
        for path in group.keys.view(group.num_paths, -1).tolist():
            if row in path:
                return tuple(stream.tokens[0, path[: path.index(row) + 1]].tolist())
    raise AssertionError(f"row {row} is on no path")


@settings(max_examples=60, deadline=None)
@given(micro=micro_batches(), multiple=st.sampled_from([1, 4]))
def test_each_trained_token_is_predicted_from_its_history(micro, multiple):
    stream = fold(micro, multiple)
    trained = micro.mask.nonzero().squeeze(1)
    assert torch.equal(stream.targets, micro.tokens[trained])
    for index, source in zip(trained.tolist(), stream.source.tolist(), strict=True):
        assert _path_of(stream, int(stream.needed[source])) == _history(micro, index)
    assert stream.tokens.shape[1] % multiple == 0


@settings(max_examples=60, deadline=None)
@given(micro=micro_batches())
def test_every_history_is_held_once_and_nothing_else(micro):
    stream = fold(micro, 1)
    trained = micro.mask.nonzero().squeeze(1).tolist()
    histories = {
        _history(micro, i)[:n] for i in trained for n in range(1, len(_history(micro, i)) + 1)
    }
    assert stream.tokens.shape[1] == max(1, len(histories))
    assert len(stream.needed) == len({_history(micro, i) for i in trained})


@settings(max_examples=30, deadline=None)
@given(micro=micro_batches())
def test_positions_are_depths(micro):
    stream = fold(micro, 1)
    for row in range(stream.tokens.shape[1]):
        assert int(stream.packed.positions[row]) == len(_path_of(stream, row)) - 1


def test_a_trained_first_token_is_refused():
    borders = torch.tensor([0, 2, 4], dtype=torch.int32)
    mask = torch.tensor([False, True, True, False])
    micro = MicroBatch(torch.arange(4), torch.tensor([0, 1, 0, 1]), mask, borders, {})
    for form in (lambda m: fold(m, 1), keep_whole):
        with pytest.raises(AssertionError, match="first token"):
            form(micro)


@settings(max_examples=30, deadline=None)
@given(micro=micro_batches())
def test_the_whole_form_keeps_the_rows_of_the_micro_batch(micro):
    stream = keep_whole(micro)
    trained = micro.mask.nonzero().squeeze(1)
    assert torch.equal(stream.tokens[0], micro.tokens)
    assert torch.equal(stream.needed[stream.source], trained - 1)
    assert torch.equal(stream.packed.cu_seqlens_q, micro.cu_seqlens)


@settings(max_examples=60, deadline=None)
@given(micro=micro_batches(), form=st.sampled_from([lambda m: fold(m, 4), keep_whole]))
def test_members_are_the_tokens_that_each_sequence_needs(micro, form):
    """So shared and dropped rows count alike however sequences are packed."""
    stream = form(micro)
    borders, trained = micro.cu_seqlens.tolist(), micro.mask.nonzero().squeeze(1).tolist()
    last = [max(own) for a, b in pairwise(borders) if (own := [t for t in trained if a <= t < b])]
    rows = [tuple(stream.tokens[0, row].tolist()) for row in stream.members]
    assert rows == [_history(micro, index) for index in last]
