"""Attention over sequences with shared beginnings equals attention over each sequence alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.mcore.core_attention import Path, SDPACoreAttention, batch_paths

CPU = torch.device("cpu")


@st.composite
def path_lists(draw):
    """Paths as a tree gives them: each begins on an earlier one and ends with rows of its own."""
    paths, num_rows = [], 0
    for _ in range(draw(st.integers(1, 10))):
        before = draw(st.sampled_from(paths)).rows if paths and draw(st.booleans()) else []
        shared = list(before[: draw(st.integers(0, len(before)))])
        own = draw(st.integers(1, 40))
        paths.append(Path([*shared, *range(num_rows, num_rows + own)], len(shared)))
        num_rows += own
    return paths, num_rows


def _positions(paths, num_rows):
    positions = [0] * num_rows
    for path in paths:
        for position, row in enumerate(path.rows):
            positions[row] = position
    return positions


@settings(max_examples=50, deadline=None)
@given(case=path_lists(), short=st.sampled_from([0, 30, 1000]))
def test_every_row_has_its_place(case, short):
    paths, num_rows = case
    packed = batch_paths(paths, _positions(paths, num_rows), CPU, short)
    rows = torch.cat([group.queries for group in packed.groups])
    assert torch.equal(rows[packed.place], torch.arange(num_rows))


@settings(max_examples=50, deadline=None)
@given(case=path_lists())
def test_groups_hold_every_path_once_and_waste_little(case):
    paths, num_rows = case
    packed = batch_paths(paths, _positions(paths, num_rows), CPU)
    found = []
    for group in packed.groups:
        lists = [list(dict.fromkeys(row)) for row in group.keys.view(group.num_paths, -1).tolist()]
        shortest = min(len(rows) for rows in lists)
        assert group.num_keys <= max(1.25 * shortest, shortest + 16)
        found += lists
    assert sorted(found) == sorted(list(path.rows) for path in paths)


def _attention(**overrides):
    settings = {"context_parallel_size": 1, "attention_dropout": 0.0, "kv_channels": 8}
    return SDPACoreAttention(SimpleNamespace(**{**settings, **overrides}), 1, None, "self")


def _rotated(x, positions, inv_freq):
    """The rotary embedding by complex numbers: dim i and i + d/2 are one plane."""
    turn = torch.polar(torch.ones(()), positions.float()[:, None] * inv_freq)[:, None]
    x1, x2 = x.chunk(2, -1)
    out = torch.complex(x1, x2) * turn
    return torch.cat([out.real, out.imag], -1)


def _alone(query, key, value, inv_freq):
    """Softmax attention of one sequence, written out: [t, heads, d]."""
    positions = torch.arange(len(query))
    query, key = _rotated(query, positions, inv_freq), _rotated(key, positions, inv_freq)
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    future = torch.ones(len(query), len(query)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@settings(max_examples=15, deadline=None)
@given(case=path_lists(), short=st.sampled_from([0, 30, 1000]))
def test_output_and_gradients_equal_each_sequence_alone(case, short):
    paths, num_rows = case
    generator = torch.Generator().manual_seed(0)
    inv_freq = 100.0 ** (-torch.arange(4) / 4)
    inputs = [torch.randn(num_rows, h, 8, generator=generator).requires_grad_() for h in (4, 2, 2)]
    positions = _positions(paths, num_rows)
    packed = batch_paths(paths, positions, CPU, short)
    angles = torch.tensor(positions).float()[:, None, None] * inv_freq
    packed.rotation = (angles.cos(), angles.sin())
    got = _attention()(*inputs, None, packed_seq_params=packed)
    plain = [x.detach().clone().requires_grad_() for x in inputs]
    expected = torch.zeros(num_rows, 32)
    for path in paths:
        rows = torch.tensor(path.rows)
        out = _alone(*(x[rows] for x in plain), inv_freq).flatten(1)
        own = rows[path.num_shared :]
        expected = expected.index_copy(0, own, out[path.num_shared :])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(got.shape, generator=generator)
    got.backward(weights)
    expected.backward(weights)
    for a, b in zip(inputs, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
