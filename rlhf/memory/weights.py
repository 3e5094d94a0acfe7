"""A role's weights as a region: given up, and brought back one of three ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rlhf.memory.released import KeptRows, Storages
from rlhf.memory.table import Region, Regions


class WayBack(Protocol):
    """See :class:`rlhf.memory.ways.Way`."""

    zeroes: bool
    """Elements that it does not write must be zero."""

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes now."""
        ...

    def keep(self, storages: Storages, *, changed: bool) -> None:
        """Before the memory is given up."""
        ...

    def bring(self, storages: Storages) -> None:
        """After the memory is back."""
        ...


class HostCopy:
    """One copy in host memory for good, pinned beside a GPU; written only when weights changed."""

    zeroes = False

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    @property
    def host_bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes

    def keep(self, storages: Storages, *, changed: bool) -> None:
        """
        Raises:
            RuntimeError: the storages are not those that the copy was made of.
        """
        if self.buffer is None:
            pinned = storages.device.type == "cuda"
            self.buffer = torch.empty(storages.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        elif not changed:
            return
        for kept, part in self._pairs(storages):
            kept.copy_(part, non_blocking=True)
        _finish(storages.device)

    def bring(self, storages: Storages) -> None:
        for kept, part in self._pairs(storages):
            part.copy_(kept, non_blocking=True)
        _finish(storages.device)

    def _pairs(self, storages: Storages) -> list[tuple[Tensor, Tensor]]:
        assert self.buffer is not None, "weights come back only after they were kept"
        parts = storages.parts()
        if self.buffer.nbytes != storages.num_bytes:
            raise RuntimeError(
                f"the host copy has {self.buffer.nbytes} bytes, the weights have "
                f"{storages.num_bytes}"
            )
        return list(zip(self.buffer.split([p.nbytes for p in parts]), parts, strict=True))


class FromMasters:
    """The optimizer's float32 masters are the weights, but for rounding."""

    host_bytes = 0
    zeroes = True

    def __init__(self, write: Callable[[], None]) -> None:
        """``write``: casts and gathers; collective over data parallel ranks."""
        self._write = write

    def keep(self, storages: Storages, *, changed: bool) -> None:
        pass

    def bring(self, storages: Storages) -> None:
        self._write()


class FromEngine:
    """Engines have what the last reshard brought them; the rest are rows that stay here."""

    host_bytes = 0
    zeroes = True

    def __init__(
        self,
        params: Mapping[str, Tensor],
        kept_rows: Mapping[str, int],
        move: Callable[[], None],
    ) -> None:
        """
        Args:
            kept_rows: see :func:`rlhf.reshard.restore.kept_rows`.
            move: the weights out of engines that are awake; collective over all ranks.
        """
        self._params = params
        self._first_rows = kept_rows
        self._move = move
        self._kept: KeptRows | None = None

    def keep(self, storages: Storages, *, changed: bool) -> None:
        """
        Raises:
            RuntimeError: no engine has these weights.
        """
        if changed:
            raise RuntimeError(
                "the actor's weights were written since the last reshard: engines cannot give them "
                "back; reshard before the next rollout or evaluation"
            )
        self._kept = KeptRows(self._params, self._first_rows)

    def bring(self, storages: Storages) -> None:
        assert self._kept is not None
        self._kept.put_back()
        self._kept = None
        self._move()


class Weights:
    """All parameters of a role on this rank."""

    def __init__(self, region: Region, params: Mapping[str, Tensor], way: WayBack) -> None:
        """``params``: those that the way brings back; others stay."""
        self.regions: Regions = frozenset({region})
        self.way = way
        self._region = region
        self._storages = Storages(params)

    def release(self, regions: Regions, *, changed: bool) -> None:
        self.way.keep(self._storages, changed=changed)
        self._storages.release()
        torch.cuda.empty_cache()  # the engine's process shall have it, not this allocator

    def settle(self) -> None:
        """It was given up at once."""

    def blocks(self) -> str:
        return ""

    def restore(self, regions: Regions) -> None:
        self._storages.take_back(zero=self.way.zeroes)
        self.way.bring(self._storages)

    def resident_bytes(self) -> Mapping[Region, int]:
        return {self._region: self._storages.resident_bytes}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
