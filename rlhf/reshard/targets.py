"""Where the rounds of a movement end: in an engine behind a window, or in tensors of the rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rlhf.reshard.pack import holds, part_view, slices_of
from rlhf.reshard.polling import Poll
from rlhf.reshard.schedule import Placed, RankPlan
from rlhf.reshard.windows import Window
from rlhf.reshard.wire import align


class Target(Protocol):
    """Takes the rounds of one rank, in order."""

    @property
    def staging_bytes(self) -> int:
        """Memory for incoming bytes."""
        ...

    def begin(self, poll: Poll) -> None:
        """Before the first round."""
        ...

    def reserve(self, number: int, poll: Poll) -> Tensor:
        """The incoming area of round ``number``, uint8, once it may be overwritten."""
        ...

    def area(self, number: int) -> Tensor:
        """The incoming area of round ``number``, of which two are kept."""
        ...

    def local_view(self, number: int, index: int) -> Tensor:
        """Where the values of the round's ``index``-th local transfer go."""
        ...

    def deliver(self, number: int) -> None:
        """All messages and local transfers of the round are there."""
        ...

    def finish(self, poll: Poll) -> None:
        """Return when everything is written."""
        ...

    def abandon(self) -> None:
        """The movement failed; leave the destination half written."""
        ...


class EngineTarget:
    """The receiver in the engine's process writes; this side posts rounds."""

    def __init__(self, plan: RankPlan, window: Window, dtype: torch.dtype, limit_s: float) -> None:
        """
        Raises:
            RuntimeError: the plan keeps local copies in the outgoing area, or the window's areas
                are smaller than its largest round.
        """
        if plan.local_area != "incoming":
            raise RuntimeError(
                f"rank {plan.rank}: an engine that is written takes local copies too; plan with "
                "local_area='incoming'"
            )
        if window.area_bytes < plan.incoming_area_bytes:
            raise RuntimeError(
                f"rank {plan.rank}: rounds take up to {plan.incoming_area_bytes} bytes, an area of "
                f"the window has {window.area_bytes}"
            )
        self._window = window
        self._limit_s = limit_s
        self._num_bytes = sum(p.num_bytes for r in plan.rounds for p in r.arriving)
        self._local_views = [
            [part_view(window.area(i), placed, dtype) for placed in round_.local]
            for i, round_ in enumerate(plan.rounds)
        ]

    @property
    def staging_bytes(self) -> int:
        return 2 * self._window.area_bytes

    def begin(self, poll: Poll) -> None:
        self._window.begin(self._limit_s, poll)

    def reserve(self, number: int, poll: Poll) -> Tensor:
        self._window.wait_done(number - 1, self._limit_s, poll)
        return self._window.area(number)

    def area(self, number: int) -> Tensor:
        return self._window.area(number)

    def local_view(self, number: int, index: int) -> Tensor:
        return self._local_views[number][index]

    def deliver(self, number: int) -> None:
        self._window.post(number + 1)

    def finish(self, poll: Poll) -> None:
        self._window.end(self._num_bytes, self._limit_s, poll)

    def abandon(self) -> None:
        self._window.abandon()


class TensorTarget:
    """Tensors of this rank: loading, export, a movement without an engine."""

    def __init__(
        self,
        plan: RankPlan,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        areas: Tensor,
    ) -> None:
        """
        Args:
            areas: [2, at least :func:`incoming_bytes`] uint8.

        Raises:
            RuntimeError: a tensor is missing or too small.
        """
        self._plan = plan
        self._tensors = tensors
        self._dtype = dtype
        for round_ in plan.rounds:
            for placed in round_.arriving:
                _check_destination(placed, tensors)
        self._areas = areas

    @property
    def staging_bytes(self) -> int:
        return self._areas.numel()

    def begin(self, poll: Poll) -> None:
        pass

    def reserve(self, number: int, poll: Poll) -> Tensor:
        return self.area(number)

    def area(self, number: int) -> Tensor:
        return self._areas[number % 2]

    def local_view(self, number: int, index: int) -> Tensor:
        placed = self._plan.rounds[number].local[index]
        return self._tensors[placed.transfer.param].detach()[slices_of(placed.transfer.box)]

    def deliver(self, number: int) -> None:
        for message in self._plan.rounds[number].incoming:
            for placed in message.parts:
                self._write(placed, part_view(self.area(number), placed, self._dtype))

    def finish(self, poll: Poll) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _write(self, placed: Placed, values: Tensor) -> None:
        transfer = placed.transfer
        self._tensors[transfer.param].detach()[slices_of(transfer.box)].copy_(values)


def incoming_bytes(plan: RankPlan) -> int:
    """What an area for messages must have: without copies from the rank itself."""
    ends = (m.offset + m.num_bytes for r in plan.rounds for m in r.incoming)
    return align(max(ends, default=0))


def _check_destination(placed: Placed, tensors: Mapping[str, Tensor]) -> None:
    transfer = placed.transfer
    tensor = tensors.get(transfer.param)
    if tensor is None:
        raise RuntimeError(f"there is no tensor {transfer.param} to write, planned for {transfer}")
    if not holds(tensor, transfer.box):
        raise RuntimeError(
            f"{transfer.param} has shape {tuple(tensor.shape)}, too small for {transfer}"
        )
