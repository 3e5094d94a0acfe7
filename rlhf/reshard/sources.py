"""Where the rounds of a movement come from: tensors of the rank, or an engine behind a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf.reshard.pack import Packer, holds, part_view, slices_of
from rlhf.reshard.polling import Poll
from rlhf.reshard.schedule import Placed, RankPlan, Transfer
from rlhf.reshard.windows import Window


class Source(Protocol):
    """Gives the rounds of one rank, in order; what the rank passes on is not its concern."""

    @property
    def staging_bytes(self) -> int:
        """Memory for outgoing bytes."""
        ...

    def begin(self, poll: Poll) -> None:
        """Before the first round."""
        ...

    def pack(self, number: int) -> None:
        """Put a round's outgoing rectangles into its area, or let it be done meanwhile."""
        ...

    def area(self, number: int) -> Tensor:
        """The outgoing area of round ``number``, uint8, of which two are kept."""
        ...

    def wait_packed(self, number: int, poll: Poll) -> None:
        """Return when all of the round is in its area."""
        ...

    def copy_local(self, number: int, index: int, view: Tensor) -> None:
        """The values of the round's ``index``-th local transfer into ``view``."""
        ...

    def release(self, number: int) -> None:
        """The round has been sent and copied: its area may be used again."""
        ...

    def finish(self, poll: Poll) -> None:
        """After the last round."""
        ...

    def abandon(self) -> None:
        """The movement failed."""
        ...


class TensorSource:
    """Tensors of this rank: what is trained."""

    def __init__(
        self, plan: RankPlan, tensors: Mapping[str, Tensor], dtype: torch.dtype, areas: Tensor
    ) -> None:
        """
        Args:
            tensors: looked up afresh in each run.
            areas: [2, at least the plan's ``outgoing_area_bytes``] uint8.

        Raises:
            RuntimeError: a tensor is missing or too small.
        """
        self._plan = plan
        self._tensors = tensors
        self._areas = areas
        self._packer = Packer()
        for round_ in plan.rounds:
            for placed in round_.leaving:
                if placed.relayed_from is None:
                    _check_source(placed.transfer, tensors)
        self._packed = [
            [
                (placed.transfer, part_view(areas[number % 2], placed, dtype))
                for message in round_.outgoing
                for placed in message.parts
                if placed.relayed_from is None
            ]
            for number, round_ in enumerate(plan.rounds)
        ]

    @property
    def staging_bytes(self) -> int:
        return self._areas.numel()

    def begin(self, poll: Poll) -> None:
        pass

    def pack(self, number: int) -> None:
        """Copy, and cast, a round's outgoing rectangles into their messages."""
        for transfer, view in self._packed[number]:
            self._packer.pack(transfer, self._values(transfer), view)

    def area(self, number: int) -> Tensor:
        return self._areas[number % 2]

    def wait_packed(self, number: int, poll: Poll) -> None:
        pass

    def copy_local(self, number: int, index: int, view: Tensor) -> None:
        transfer = self._plan.rounds[number].local[index].transfer
        self._packer.pack(transfer, self._values(transfer), view)

    def release(self, number: int) -> None:
        pass

    def finish(self, poll: Poll) -> None:
        """
        Raises:
            ValueError: what was quantised was not finite.
        """
        self._packer.check()

    def abandon(self) -> None:
        pass

    def _values(self, transfer: Transfer) -> Tensor:
        """
        Raises:
            ValueError: the parameter was there when the movement was planned and no longer is.
        """
        tensor = self._tensors.get(transfer.source_param)
        if tensor is None:
            raise ValueError(f"parameter {transfer.source_param} is gone; planned was {transfer}")
        return tensor.detach()[slices_of(transfer.source_box)]


class EngineSource:
    """The receiver in the engine's process reads; this side says which rounds it has taken."""

    def __init__(self, plan: RankPlan, window: Window, dtype: torch.dtype, limit_s: float) -> None:
        """
        Raises:
            RuntimeError: the plan keeps local copies in the incoming area, transposes something,
                or has rounds that are larger than the window's areas.
        """
        if plan.local_area != "outgoing":
            raise RuntimeError(
                f"rank {plan.rank}: an engine that is read gives local copies too; plan with "
                "local_area='outgoing'"
            )
        if window.area_bytes < plan.outgoing_area_bytes:
            raise RuntimeError(
                f"rank {plan.rank}: rounds take up to {plan.outgoing_area_bytes} bytes, an area of "
                f"the window has {window.area_bytes}"
            )
        for transfer in (p.transfer for r in plan.rounds for p in r.leaving):
            if transfer.transposed:
                raise RuntimeError(
                    f"an engine that is read gives its weights as they lie; {transfer} would have "
                    "to be transposed"
                )
        self._window = window
        self._limit_s = limit_s
        self._read = [[p for p in r.leaving if p.relayed_from is None] for r in plan.rounds]
        self._local_views = [
            [part_view(window.area(i), placed, dtype) for placed in round_.local]
            for i, round_ in enumerate(plan.rounds)
        ]

    @property
    def staging_bytes(self) -> int:
        return 2 * self._window.area_bytes

    def reads(self) -> list[list[list[Any]]]:
        """By round: [parameter, box, offset in the area, dtype there or None]; JSON."""
        return [
            [
                [p.transfer.source_param, p.transfer.source_box, p.offset, p.transfer.dtype]
                for p in placed
            ]
            for placed in self._read
        ]

    def begin(self, poll: Poll) -> None:
        self._window.begin(self._limit_s, poll)

    def pack(self, number: int) -> None:
        pass

    def area(self, number: int) -> Tensor:
        return self._window.area(number)

    def wait_packed(self, number: int, poll: Poll) -> None:
        self._window.wait_done(number + 1, self._limit_s, poll, "read")

    def copy_local(self, number: int, index: int, view: Tensor) -> None:
        view.copy_(self._local_views[number][index])

    def release(self, number: int) -> None:
        self._window.post(number + 1)

    def finish(self, poll: Poll) -> None:
        num_bytes = sum(placed.num_bytes for some in self._read for placed in some)
        self._window.end(num_bytes, self._limit_s, poll)

    def abandon(self) -> None:
        self._window.abandon()


def relayed(plan: RankPlan, number: int) -> list[Placed]:
    """What the rank passes on in a round."""
    return [
        placed
        for message in plan.rounds[number].outgoing
        for placed in message.parts
        if placed.relayed_from is not None
    ]


def _check_source(transfer: Transfer, params: Mapping[str, Tensor]) -> None:
    param = params.get(transfer.source_param)
    if param is None:
        raise RuntimeError(f"there is no parameter {transfer.source_param}; planned was {transfer}")
    if not holds(param, transfer.source_box):
        raise RuntimeError(
            f"rank {transfer.source}: {transfer.source_param} has shape {tuple(param.shape)}, too "
            f"small for {transfer}"
        )
