"""Functions with a backward pass of their own: fewer passes over memory than autograd's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNormFunction(torch.autograd.Function):
    """x / rms(x) * weight over the last dim, computed in float32 (arXiv:1910.07467, Eq. 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inner = x.float()
        mean_square = torch.linalg.vector_norm(inner, dim=-1, keepdim=True).square_()
        scale = mean_square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (inner * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, width = grads[0].float(), x.shape[-1]
        normed = x.float() * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ weight.float()).div_(width)[..., None]
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class SwiGLUFunction(torch.autograd.Function):
    """silu(x1) * x2 for x = [x1, x2] along the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(F.silu(gate), grads[0], out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return grad_x


class Rotate(torch.autograd.Function):
    """Rotary embedding of the first 2 r elements of heads [S, heads, d], in halves, the rest kept.

    Cosine and sine are [S, 1, r].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(grads[0], cosine, sine, -1.0), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = cosine.shape[-1]
    sizes = [half, half, x.shape[-1] - 2 * half]
    (x1, x2, kept), (y1, y2, rest) = x.split(sizes, -1), out.split(sizes, -1)
    torch.mul(x1, cosine, out=y1).addcmul_(x2, sine, value=-sign)
    torch.mul(x2, cosine, out=y2).addcmul_(x1, sine, value=sign)
    rest.copy_(kept)
    return out
