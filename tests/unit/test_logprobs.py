"""The chunked head equals log_softmax over the whole matrix of logits: values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.mcore.logprobs import HeadSettings, linear_logprobs

TOLERANCE = 1e-5


def naive(hidden, weight, targets, temperature, source=None):
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    log_p = log_p if source is None else log_p[source]
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def one_each(hidden, weight, targets, how):
    return linear_logprobs(hidden, weight, torch.arange(len(targets)), targets, how)


def _settings(vocab, chunk_rows=16, temperature=1.0, fp32=True, block_columns=32):
    return HeadSettings(
        temperature=temperature,
        first_column=0,
        num_columns=vocab,
        chunk_rows=chunk_rows,
        fp32=fp32,
        block_columns=block_columns,
    )


def _inputs(rows, vocab, width=24, padding=0, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator) * scale
    weight = torch.randn(vocab + padding, width, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, weight, targets, torch.randn(2, rows, generator=generator)


def _relative(got, expected):
    return float((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    num_targets=st.integers(0, 60),
    vocab=st.integers(2, 70),
    chunk_rows=st.integers(1, 50),
    padding=st.integers(0, 5),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    block=st.integers(1, 80),
)
def test_values_and_gradients_equal_the_naive_form(
    rows, num_targets, vocab, chunk_rows, padding, temperature, block
):
    hidden, weight, *_ = _inputs(rows, vocab, padding=padding)
    _, _, targets, grads = _inputs(num_targets, vocab, seed=1)
    source = torch.randint(0, rows, (num_targets,), generator=torch.Generator().manual_seed(2))
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    how = _settings(vocab, chunk_rows, temperature, block_columns=block)
    got = linear_logprobs(h, w, source, targets, how)
    torch.autograd.backward(list(got), list(grads))
    h64 = hidden.double().requires_grad_()
    w64 = weight.double()[:vocab].requires_grad_()
    expected = naive(h64, w64, targets, temperature, source)
    torch.autograd.backward(list(expected), list(grads.double()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=1e-6, atol=TOLERANCE)
    assert _relative(h.grad, h64.grad) <= TOLERANCE
    assert _relative(w.grad[:vocab], w64.grad) <= TOLERANCE
    assert not w.grad[vocab:].any(), "padding rows have no gradient"


def test_large_logits_neither_overflow_nor_lose_the_entropy():
    hidden, weight, targets, _ = _inputs(20, 50, scale=40.0)
    logprobs, entropy = one_each(hidden, weight, targets, _settings(50))
    expected = naive(hidden.double(), weight.double(), targets, 1.0)
    assert bool(logprobs.isfinite().all())
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-4, atol=1e-4)


def test_a_certain_distribution_has_no_entropy_and_no_gradient():
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    logprobs, entropy = one_each(hidden, weight, torch.tensor([0]), _settings(2))
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)
    (logprobs + entropy).sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_no_rows_give_the_weight_a_gradient_of_zeros():
    hidden, weight, targets, _ = _inputs(0, 30)
    weight.requires_grad_()
    logprobs, entropy = one_each(hidden, weight, targets, _settings(30))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_entropy_alone_carries_gradient():
    hidden, weight, targets, _ = _inputs(7, 30)
    hidden.requires_grad_()
    one_each(hidden, weight, targets, _settings(30))[1].sum().backward()
    h64 = hidden.detach().double().requires_grad_()
    naive(h64, weight.double(), targets, 1.0)[1].sum().backward()
    assert _relative(hidden.grad, h64.grad) <= TOLERANCE


@pytest.mark.parametrize(("fp32", "tolerance"), [(True, 1e-5), (False, 0.2)])
def test_a_bfloat16_body_keeps_a_float32_head(fp32, tolerance):
    """With fp32 the products are exact to float32; without, they are rounded to bfloat16."""
    hidden, weight, targets, _ = _inputs(30, 60)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    got, _ = one_each(hidden, weight, targets, _settings(60, fp32=fp32))
    expected, _ = naive(hidden.double(), weight.double(), targets, 1.0)
    error = float((got - expected).abs().max())
    assert error <= tolerance
    assert got.dtype == torch.float32
    assert fp32 or error > 1e-4


def test_the_frozen_weight_gets_no_gradient():
    hidden, weight, targets, _ = _inputs(5, 30)
    hidden.requires_grad_()
    one_each(hidden, weight, targets, _settings(30))[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
