"""Weights as float8_e4m3fn with a float32 scale per block of 128 x 128, as DeepSeek-V3 has them.

For each block: scale = max(largest magnitude, 1e-4) / 448, and fp8 = weight / scale, rounded to
nearest even; so weight = fp8 * scale. A block at the end may be smaller than 128. This is what
SGLang's own conversion to block fp8 computes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from rlhf.weights.block_scales import BLOCK, scale_shape

LARGEST = 448.0
"""Of float8_e4m3fn."""
LEAST_MAGNITUDE = 1e-4
"""A block of smaller weights is scaled as if this were its largest; so are zeros."""
STRIP_ELEMENTS = 2**22
"""Rows are taken so many elements at a time: the float32 quotients of a strip are all the memory
that is needed beside the result. At least one row of blocks."""

Kind = Literal["weight", "scale"]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The fp8 weight and its scales.

    Args:
        weight: [..., rows, columns], any float dtype, any strides.

    Returns:
        (float8_e4m3fn [..., rows, columns], float32 [..., ceil(rows / 128), ceil(columns / 128)]).

    Raises:
        ValueError: an element is NaN or infinite.
    """
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    _quantize(weight, values, scales)
    refuse_not_finite({f"a weight of shape {list(weight.shape)}": _not_finite(scales)})
    return values, scales


def pack(weight: Tensor, kind: Kind, out: Tensor) -> Tensor:
    """Write the fp8 values or the scales of a rectangle into ``out``.

    Waits for nothing on a GPU, so what is not finite is not refused here: its scale is NaN or
    infinite, and the answer says so. Scales and values are computed each for themselves, the same
    both times, so that they may travel apart.

    Args:
        weight: [..., rows, columns], any float dtype, any strides: a rectangle whose cuts lie
            between blocks.
        out: contiguous; float8_e4m3fn of the weight's shape, or float32 of
            ``scale_shape(weight.shape)``.

    Returns:
        bool [], on the weight's device: some element is NaN or infinite. For
        :func:`refuse_not_finite`.

    Raises:
        ValueError: ``out`` has another shape or dtype, or is not contiguous.
    """
    shape = tuple(weight.shape) if kind == "weight" else scale_shape(weight.shape)
    dtype = torch.float8_e4m3fn if kind == "weight" else torch.float32
    if tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"the {kind} of a rectangle {list(weight.shape)} needs contiguous {dtype} of "
            f"{list(shape)}, got {'' if out.is_contiguous() else 'strided '}{out.dtype} of "
            f"{list(out.shape)}"
        )
    if kind == "scale":
        _quantize(weight, None, out)
        return _not_finite(out)
    scales = torch.empty(scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    _quantize(weight, out, scales)
    return _not_finite(scales)


def refuse_not_finite(found: Mapping[str, Tensor]) -> None:
    """Read what :func:`pack` answered, all at once; on a GPU this waits for it.

    Raises:
        ValueError: names every rectangle with a NaN or an infinite element.
    """
    if not found:
        return
    bad = torch.stack(list(found.values())).tolist()
    names = [name for name, is_bad in zip(found, bad, strict=True) if is_bad]
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ValueError(
            "block fp8 needs finite weights; NaN or infinite elements are in "
            + ", ".join(names[:8])
            + more
        )


def _not_finite(scales: Tensor) -> Tensor:
    """A NaN and an infinity reach the scale of their block."""
    return scales.isfinite().all().logical_not()


def _quantize(weight: Tensor, values: Tensor | None, scales: Tensor) -> None:
    """Fill ``scales`` and, unless None, ``values``."""
    if weight.dim() > 2:
        for i in range(weight.shape[0]):
            _quantize(weight[i], None if values is None else values[i], scales[i])
        return
    if weight.dtype == torch.float64:
        weight = weight.float()  # narrower ones become float32 in the division
    rows, cols = weight.shape
    for top, bottom, height in _runs(rows, max(1, STRIP_ELEMENTS // (BLOCK * max(cols, 1)))):
        for left, right, width in _runs(cols, cols):
            part = _blocks(weight[top:bottom, left:right], height, width)
            # two reductions and no copy of the magnitudes
            largest = torch.maximum(part.amax((1, 3), True), -part.amin((1, 3), True)).float()
            scale = largest.clamp(min=LEAST_MAGNITUDE) / LARGEST
            at = scales[top // BLOCK :, left // BLOCK :]
            at[: scale.shape[0], : scale.shape[2]] = scale[:, 0, :, 0]
            if values is not None:
                out = _blocks(values[top:bottom, left:right], height, width)
                out.copy_(part / scale)


def _runs(size: int, blocks_per_run: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size of each block): runs of whole blocks, then the rest as one block."""
    whole = size // BLOCK * BLOCK
    step = BLOCK * blocks_per_run
    for start in range(0, whole, step):
        yield start, min(start + step, whole), BLOCK
    if whole < size:
        yield whole, size, size - whole


def _blocks(matrix: Tensor, height: int, width: int) -> Tensor:
    """[rows, columns] as [block rows, height, block columns, width]; a view."""
    return matrix.unflatten(1, (-1, width)).unflatten(0, (-1, height))
