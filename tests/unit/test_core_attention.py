"""Attention over packed sequences equals attention over each sequence alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.mcore.core_attention import SDPACoreAttention, pack_sequences

lengths_lists = st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(lambda x: sum(x) > 0)


def _borders(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_lists)
def test_order_undoes_the_grouping(lengths):
    packed = pack_sequences(_borders(lengths))
    rows = torch.cat([g.rows for g in packed.groups])
    assert torch.equal(rows[packed.order], torch.arange(sum(lengths)))


@settings(max_examples=50, deadline=None)
@given(lengths=lengths_lists)
def test_groups_hold_every_sequence_once_and_waste_little(lengths):
    packed = pack_sequences(_borders(lengths))
    assert sum(g.num_sequences for g in packed.groups) == sum(n > 0 for n in lengths)
    for group in packed.groups:
        rows = group.rows.view(group.num_sequences, group.longest)
        shortest = min(len(row.unique()) for row in rows)
        assert group.longest <= max(1.25 * shortest, shortest + 16)


def _attention(heads=4, kv_heads=2, width=8, **overrides):
    config = SimpleNamespace(
        context_parallel_size=1, attention_dropout=0.0, kv_channels=width, **overrides
    )
    return SDPACoreAttention(config, 1, None, "self")


def _plain(query, key, value):
    """Softmax attention of one sequence, written out: [t, heads, d]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    future = torch.ones(len(query), len(query)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@settings(max_examples=15, deadline=None)
@given(lengths=lengths_lists)
def test_output_and_gradients_equal_each_sequence_alone(lengths):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    inputs = [torch.randn(total, h, 8, generator=generator).requires_grad_() for h in (4, 2, 2)]
    packed = pack_sequences(_borders(lengths))
    got = _attention()(*inputs, None, packed_seq_params=packed)
    alone = [x.detach().clone().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in alone), strict=True)
    expected = torch.cat([_plain(q, k, v) for q, k, v in parts if len(q)]).flatten(1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(got.shape, generator=generator)
    got.backward(weights)
    expected.backward(weights)
    for a, b in zip(inputs, alone, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_context_parallelism_without_transformer_engine_is_refused():
    config = SimpleNamespace(context_parallel_size=2, attention_dropout=0.0, kv_channels=8)
    with pytest.raises(ValueError, match="cp > 1"):
        SDPACoreAttention(config, 1, None, "self")
