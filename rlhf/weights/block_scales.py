"""Scales of block-fp8 weights as tensors with regions of their own. Pure Python, no torch.

A weight ``X`` in float8_e4m3fn has a float32 tensor ``X_scale_inv`` beside it with one number for
every block of 128 x 128 elements (those at the end may be smaller): weight = fp8 * scale. So a
rectangle of the weight whose cuts lie between blocks has a rectangle of scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf.weights.piece import FLOAT32, Box, Piece, show_box

BLOCK = 128
"""Rows and columns of a block."""
_SUFFIX = "_scale_inv"


def scale_name(weight: str) -> str:
    """Name of the scales of a weight, a tensor's or a parameter's."""
    return weight + _SUFFIX


def weight_name(scale: str) -> str:
    """Name of the weight of which a tensor has the scales."""
    return scale.removesuffix(_SUFFIX)


def is_scale(name: str) -> bool:
    """Whether a tensor is one of scales."""
    return name.endswith("weight" + _SUFFIX)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Of the scales of a weight [..., rows, columns]."""
    *front, rows, cols = shape
    return (*front, -(-rows // BLOCK), -(-cols // BLOCK))


def scale_box(box: Box) -> Box:
    """The scales of a rectangle [..., rows, columns] whose cuts lie between blocks."""
    return box[:-2] + tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box[-2:])


def split_blocks(box: Box, shape: Sequence[int]) -> Iterator[int]:
    """The cuts of ``box`` that go through a block of a weight of ``shape``."""
    for (start, stop), size in zip(box[-2:], shape[-2:], strict=True):
        if start % BLOCK:
            yield start
        if stop % BLOCK and stop != size:
            yield stop


def scale_piece(weight: Piece, shape: Sequence[int]) -> Piece:
    """The scales that can be computed from what a shard holds of a weight, as if it held them.

    ``local`` stays the weight's rectangle; :func:`weight_box` cuts it.

    Args:
        shape: of the full weight.

    Raises:
        ValueError: a cut goes through a block, so that no rank sees the whole of it.
    """
    if cuts := list(split_blocks(weight.region, shape)):
        raise ValueError(
            f"{weight.tensor}: a rank holds {show_box(weight.region)} of {list(shape)} in "
            f"{weight.param}, and the cut at {cuts[0]} is no multiple of {BLOCK}: no rank has the "
            "whole block that one fp8 scale is for; cut over fewer ranks"
        )
    region = scale_box(weight.region)
    return Piece(scale_name(weight.tensor), region, weight.param, weight.local, FLOAT32)


def weight_box(scales: Box, region: Box, local: Box) -> Box:
    """Where the weights lie of which ``scales`` are the scales.

    Args:
        scales: a rectangle inside ``region``.
        region, local: scales of a held weight, and where that weight lies; as in the piece that
            :func:`scale_piece` makes.

    Returns:
        A rectangle of the parameter, with the dims of ``local``.
    """
    front, matrix = local[:-2], local[-2:]
    return front + tuple(
        (low + (start - origin) * BLOCK, min(low + (stop - origin) * BLOCK, high))
        for (start, stop), (origin, _), (low, high) in zip(scales, region, matrix, strict=True)
    )
