"""Rotary position embedding (arXiv:2104.09864): frequencies of a model, and their scalings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf.weights.model_shape import Llama3Rope, ModelShape, YarnRope


def frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """(angle per position [rotary_dim / 2] float32, factor of cosine and sine).

    Same as transformers' rope types default, llama3 and yarn.
    """
    exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if isinstance(scaling, Llama3Rope):
        return scale_llama3(plain, scaling), 1.0
    if isinstance(scaling, YarnRope):
        factor = _mscale(scaling.factor, scaling.mscale)
        return scale_yarn(plain, shape.rope_theta, scaling), factor / _all_dim(scaling)
    return plain, 1.0


def softmax_scale(shape: ModelShape, head_dim: int) -> float:
    """Factor of the attention scores; YaRN's second factor goes to latent attention only."""
    scale = head_dim**-0.5
    if shape.mla is not None and isinstance(shape.rope_scaling, YarnRope):
        scale *= _all_dim(shape.rope_scaling) ** 2
    return scale


def scale_llama3(inv_freq: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3's frequencies: long waves slowed by ``factor``, short ones kept, between a blend.

    Source: the Llama 3.1 reference code (apply_scaling); same as transformers' rope type llama3.
    """
    wavelength = 2 * math.pi / inv_freq
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inv_freq / scaling.factor + share * inv_freq


def scale_yarn(inv_freq: Tensor, theta: float, scaling: YarnRope) -> Tensor:
    """YaRN's frequencies: a ramp over the dims from kept to slowed (arXiv:2309.00071, 3.2)."""
    half = len(inv_freq)

    def dim_of(rotations: float) -> float:
        """The dim whose wave turns so often within the original context."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return half * math.log(turns) / math.log(theta)

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), 2 * half - 1)
    dims = torch.arange(half, dtype=torch.float32)
    slowed = ((dims - low) / max(high - low, 0.001)).clamp(0, 1)
    return slowed * inv_freq / scaling.factor + (1 - slowed) * inv_freq


def _all_dim(scaling: YarnRope) -> float:
    return _mscale(scaling.factor, scaling.mscale_all_dim)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
