"""Functions with a backward pass of their own equal torch's autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlhf.mcore.kernels import RMSNormFunction, Rotate, SwiGLUFunction


def _compare(ours, plain, inputs, tolerance=1e-5):
    left = [x.clone().requires_grad_() for x in inputs]
    right = [x.clone().double().requires_grad_() for x in inputs]
    got, expected = ours(*left), plain(*right)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(9))
    got.backward(weights.to(got.dtype))
    expected.backward(weights.double())
    for a, b in zip(left, right, strict=True):
        limit = tolerance * float(b.grad.abs().max())
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0, atol=limit)


def _random(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm(dtype, tolerance):
    _compare(
        lambda x, w: RMSNormFunction.apply(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
        _random((7, 2, 16), (16,), dtype=dtype),
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_gated_activation(dtype, tolerance):
    _compare(
        SwiGLUFunction.apply,
        lambda x: F.silu(x[..., :6]) * x[..., 6:],
        _random((5, 1, 12), dtype=dtype),
        tolerance,
    )


def test_rotation_turns_back_in_the_backward_pass():
    (angles,) = _random((5, 1, 4))
    cosine, sine = angles.cos(), angles.sin()

    def plain(x):
        x1, x2 = x.chunk(2, -1)
        c, s = cosine.double(), sine.double()
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)

    _compare(lambda x: Rotate.apply(x, cosine, sine), plain, _random((5, 3, 8)))
