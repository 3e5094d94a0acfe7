"""The bytes of a transfer, in the destination's dtype, block fp8 included."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.reshard.schedule import Placed, Transfer
from rlhf.weights.block_fp8 import pack, refuse_not_finite
from rlhf.weights.piece import Box


def part_view(area: Tensor, placed: Placed, dtype: torch.dtype) -> Tensor:
    """The bytes of one transfer as a contiguous tensor of its destination's shape; a view.

    Args:
        dtype: the model's; a transfer may have its own.
    """
    own = placed.transfer.dtype
    data = area[placed.offset : placed.offset + placed.num_bytes]
    data = data.view(dtype if own is None else getattr(torch, own))
    return data.view([stop - start for start, stop in placed.transfer.box])


class Packer:
    """Copies rectangles of parameters into transfers; remembers what cannot be in fp8."""

    def __init__(self) -> None:
        self._not_finite: dict[str, Tensor] = {}

    def pack(self, transfer: Transfer, values: Tensor, out: Tensor) -> None:
        """Transpose where it is asked, and cast or quantise, ``values`` into ``out``.

        Args:
            values: the source's rectangle, any strides.
            out: of the destination's shape and dtype.
        """
        if transfer.transposed:
            values = values.mT
        if transfer.form == "plain":
            out.copy_(values.reshape(out.shape))  # a stack's slot is a dim of one; still a view
            return
        # a rank's copy into its own tensor may be strided, which the quantiser does not write
        whole = (
            out
            if out.is_contiguous()
            else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        )
        matrix = whole.view(out.shape[out.dim() - values.dim() :])
        self._not_finite[str(transfer)] = pack(values, transfer.form, matrix)
        if whole is not out:
            out.copy_(whole)

    def check(self) -> None:
        """
        Raises:
            ValueError: what was quantised had a NaN or an infinite element; names all such.
        """
        found, self._not_finite = self._not_finite, {}
        refuse_not_finite(found)


def holds(tensor: Tensor, box: Box) -> bool:
    """Whether a rectangle lies inside a tensor."""
    return tensor.dim() == len(box) and all(
        stop <= size for (_, stop), size in zip(box, tensor.shape, strict=True)
    )


def slices_of(box: Box) -> tuple[slice, ...]:
    """The index of a rectangle."""
    return tuple(slice(start, stop) for start, stop in box)
