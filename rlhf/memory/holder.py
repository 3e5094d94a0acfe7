"""What the time-slice asks of an owner of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rlhf.memory.table import Region, Regions


class Holder(Protocol):
    """Memory of one or several regions that can be given up and taken back.

    All ranks call in the same order, so both may be collective.
    """

    @property
    def regions(self) -> Regions:
        """All that it holds."""
        ...

    def release(self, regions: Regions, *, changed: bool) -> None:
        """Give up the memory of ``regions``, a part of its own.

        ``changed``: it was written since the last release; what brings it back is out of date.
        """
        ...

    def settle(self) -> None:
        """After releases, before anything is restored: what other processes of the device have
        to give up is given up when this returns. May be collective over all ranks."""
        ...

    def blocks(self) -> str:
        """Why nobody may take memory yet; empty: they may."""
        ...

    def restore(self, regions: Regions) -> None:
        """Take the memory back, with what was in it."""
        ...

    def resident_bytes(self) -> Mapping[Region, int]:
        """Bytes of the device that this rank has for each now; regions that cannot be measured
        are left out."""
        ...
