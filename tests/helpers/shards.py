"""Shards as tensors: cut full tensors by pieces, and models that look like an engine's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf.dist.layout import RolloutLayout
from rlhf.weights.block_scales import scale_name
from rlhf.weights.families import full_shapes, rollout_pieces
from rlhf.weights.piece import FLOAT8, Box, Piece

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rlhf.weights.model_shape import ModelShape


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def coded_tensors(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Full tensors whose elements all differ (over all tensors, as far as ``dtype`` can tell)."""
    import torch

    out, at = {}, 1
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        out[name] = torch.arange(at, at + size, dtype=torch.float64).reshape(shape).to(dtype)
        at += size
    return out


def cut(
    full: Mapping[str, Tensor], pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """The local parameters that ``pieces`` describe; elements that no piece covers are -1."""
    import torch

    dtype = next(iter(full.values())).dtype
    out = {name: torch.full(tuple(shape), -1, dtype=dtype) for name, shape in shapes.items()}
    for piece in pieces:
        part = full[piece.tensor][slices(piece.region)]
        part = part.mT if piece.transposed else part
        view = out[piece.param][slices(piece.local)]
        view.copy_(part.reshape(view.shape))
    return out


def random_checkpoint(shape: ModelShape, *, mtp: bool = False) -> dict[str, Tensor]:
    """Random full tensors, float32 and exact in bfloat16."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).bfloat16().float()
        for name, size in full_shapes(shape, mtp=mtp).items()
    }


def fp8_checkpoint(shape: ModelShape) -> dict[str, Tensor]:
    """:func:`random_checkpoint` with the matrices of the layers in block fp8, and their scales."""
    from rlhf.weights.block_fp8 import quantize

    pieces = rollout_pieces(shape, RolloutLayout(1, quantization="block_fp8"), 0)
    scaled = {piece.tensor for piece in pieces if piece.dtype == FLOAT8}
    out: dict[str, Tensor] = {}
    for name, values in random_checkpoint(shape).items():
        if name in scaled:
            out[name], out[scale_name(name)] = quantize(values)
        else:
            out[name] = values
    return out


def dtypes_of(pieces: Sequence[Piece], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameter -> dtype, in a model of ``dtype``."""
    import torch

    return {p.param: getattr(torch, p.dtype) if p.dtype else dtype for p in pieces}


def dummy_engine(
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """A module with an engine's parameter names and shapes, filled with NaN.

    Args:
        dtypes: of parameters that are not of ``dtype``.
    """
    import torch
    from torch import nn

    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = torch.full(tuple(shape), float("nan"), dtype=(dtypes or {}).get(name, dtype))
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    return root
