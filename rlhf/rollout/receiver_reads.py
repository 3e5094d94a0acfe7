"""What the receiver checks before it lets live parameters be read. Torch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

EXACT = {
    torch.float32: {torch.float32, torch.bfloat16},
    torch.bfloat16: {torch.bfloat16},
}
"""Dtype in the engine -> what may be asked of it. From float32 bfloat16 is exact where that is what
was written there; from bfloat16 float32 would be what the engine rounded."""


def read_dtype(own: str | None, default: str) -> torch.dtype:
    """In which a read's bytes go to the rank."""
    return getattr(torch, default if own is None else own)


def check_reads(live: Mapping[str, Tensor], rounds: list[list[list[Any]]], default: str) -> None:
    """
    Args:
        rounds: by round, reads of [parameter, box, offset, dtype or None].
        default: dtype of reads that have none of their own.

    Raises:
        ValueError: a parameter is missing, too small, or of a dtype from which what is trained
            cannot be had exactly; all faults at once.
    """
    faults = set()
    for param, box, _, own in (read for reads in rounds for read in reads):
        if param not in live:
            faults.add(f"the model has no parameter {param}")
            continue
        shape, dtype, wanted = list(live[param].shape), live[param].dtype, read_dtype(own, default)
        if len(box) != len(shape) or any(b[1] > n for b, n in zip(box, shape, strict=True)):
            faults.add(f"{param} has shape {shape}, the plan reads {box}")
        if wanted not in EXACT.get(dtype, ()):
            faults.add(f"{param} is {dtype}, from which {wanted} cannot be had exactly")
    if faults:
        shown = sorted(faults)
        more = f"; and {len(shown) - 12} more" if len(shown) > 12 else ""
        raise ValueError("engine and way back differ: " + "; ".join(shown[:12]) + more)
