"""A training shard before it gives up its memory and after it is back: the same, by checksum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.reshard.checksum import Checksum

SHOWN = 4
"""Parameters that a refusal names; the others are counted."""


def shard_sums(params: Mapping[str, Tensor]) -> dict[str, int]:
    """64-bit checksum of each parameter; every byte is read once. On a GPU this waits.

    Args:
        params: by name, all on one device.
    """
    if not params:
        return {}
    checksum = Checksum(next(iter(params.values())).device)
    sums = torch.stack([checksum.of(param.detach()) for param in params.values()])
    return dict(zip(params, sums.tolist(), strict=True))


def restore_faults(before: Mapping[str, int], params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Which parameters are not what they were, in words; empty if all are.

    Args:
        before: :func:`shard_sums` of the same parameters, taken when they were right.
    """
    now = shard_sums(params)
    wrong = [name for name in before if now.get(name) != before[name]]
    faults = [f"{name} is not what it was before its memory was given up" for name in wrong]
    more = len(faults) - SHOWN
    return (*faults[:SHOWN], *([f"and {more} more of these"] if more > 0 else []))


class ShardRecord:
    """What a rank's shard was when it was last moved to engines, if anybody wants to know."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._sums: dict[str, int] = {}

    def take(self, *, verify: bool) -> None:
        """Sum up what is there now; without ``verify`` forget what was."""
        self._sums = shard_sums(self._params) if verify else {}

    def faults(self) -> tuple[str, ...]:
        """Parameters that are no longer what they were; none if nothing is known."""
        return restore_faults(self._sums, self._params)
