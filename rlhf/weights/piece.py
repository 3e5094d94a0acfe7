"""A piece: this rectangle of a full tensor lives in this rectangle of a local parameter.

Megatron shards, SGLang shards and safetensors files are all lists of pieces; a movement of weights
is the intersection of a source's pieces with a destination's. Pure Python, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open range per dim."""
FLOAT32 = "float32"
FLOAT8 = "float8_e4m3fn"
ITEMSIZES = {FLOAT32: 4, FLOAT8: 1}
"""Bytes per element of the dtypes that a parameter may have for itself."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """``tensor[region]`` (HF name, HF coordinates) is stored in ``param[local]`` of one rank.

    The two boxes have the same size in every dim that is not of size one, in the same order but
    for the rows and columns of what is transposed. Only for block scales
    that follow from a weight is ``local`` that of the weight (``block_scales.scale_piece``).
    """

    tensor: str
    region: Box
    param: str
    local: Box
    dtype: str | None = None
    """Of the parameter, where it has its own (a key of ``ITEMSIZES``); None: the model's."""
    transposed: bool = False
    """Rows of the region, which is a matrix, are columns of ``local``."""


def box_size(box: Box) -> int:
    """Number of elements."""
    return math.prod(stop - start for start, stop in box)


def full_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common rectangle of two boxes of one tensor, or None."""
    out = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return out if all(start < stop for start, stop in out) else None


def show_box(box: Box) -> str:
    """``[0:4, 2:6]``."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def moved_box(part: Box, region: Box, local: Box, transposed: bool = False) -> Box:
    """Where ``part`` of ``region`` lies when ``region`` lies at ``local``.

    ``local`` may have more dims in front (an expert stack); they keep their range.
    """
    if part == region:
        return local
    if transposed:
        part, region = part[::-1], region[::-1]
    front = len(local) - len(region)
    return local[:front] + tuple(
        (start - origin + base, stop - origin + base)
        for (start, stop), (origin, _), (base, _) in zip(part, region, local[front:], strict=True)
    )
