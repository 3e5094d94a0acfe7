"""One rank's movement of weights, round by round, in bounded memory.

While round r is on the wire, round r + 1 is packed and round r - 1 is written into its parameters.
What a rank passes on to its node is packed for round r + 1 out of what came in round r - 1, whose
area is overwritten from round r + 1 on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf.reshard.pack import Packer, part_view, slices_of
from rlhf.reshard.polling import Poll
from rlhf.reshard.rounds import RELAY_ROUNDS
from rlhf.reshard.schedule import Placed, RankPlan, Round, Transfer
from rlhf.reshard.targets import EngineTarget, Target, TensorTarget
from rlhf.reshard.transport import Parcel, Transport, TransportError
from rlhf.reshard.windows import ReceiverError, Window


@dataclass(slots=True)
class MoveStats:
    """One movement on one rank. ``*_s`` are seconds of this rank's own thread."""

    num_rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    pack_s: float = 0.0  # parameters into outgoing messages
    local_s: float = 0.0  # parameters into the rank's own destination
    wire_s: float = 0.0  # waiting for peers
    write_s: float = 0.0  # waiting for the receiver, or writing tensors
    total_s: float = 0.0


class Mover:
    """Moves what a rank's share of a plan says, once per :meth:`run`."""

    def __init__(
        self,
        rank_plan: RankPlan,
        params: Mapping[str, Tensor],
        transport: Transport,
        target: Window | Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        limit_s: float = 120.0,
        padding_params: Collection[str] = (),
    ) -> None:
        """
        Args:
            params: this rank's source parameters; looked up afresh in each run.
            target: the window to an engine, or tensors to fill in place.
            dtype: dtype of the bytes on their way, which is the destination's; a transfer's own
                goes before it.
            limit_s: longest wait for a peer or for the receiver.
            padding_params: the engine's parameters that hold nothing but vocabulary padding on
                this rank; any other that the plan does not write is refused by the receiver.

        Raises:
            RuntimeError: a parameter is missing or too small, or the window is too small.
        """
        if dtype.itemsize != rank_plan.itemsize:
            raise RuntimeError(
                f"the plan counts {rank_plan.itemsize} bytes per element, {dtype} has "
                f"{dtype.itemsize}"
            )
        self.plan = rank_plan
        self.dtype = dtype
        self._params = params
        self._transport = transport
        self._limit_s = limit_s
        self._padding_params = sorted(padding_params)
        for transfer in self._sources():
            _check_source(transfer, params)
        self._packer = Packer()
        self._window = target if isinstance(target, Window) else None
        self._target: Target = (
            EngineTarget(rank_plan, target, dtype, limit_s)
            if isinstance(target, Window)
            else TensorTarget(rank_plan, target, dtype, transport.device)
        )
        self._staging = torch.empty(
            2, rank_plan.outgoing_area_bytes, dtype=torch.uint8, device=transport.device
        )
        self._packed_views = [
            [[part_view(self._staging[i % 2], p, dtype) for p in m.parts] for m in r.outgoing]
            for i, r in enumerate(rank_plan.rounds)
        ]

    @property
    def window(self) -> Window:
        """The window to the engine.

        Raises:
            RuntimeError: the target is not an engine.
        """
        if self._window is None:
            raise RuntimeError("this movement ends in tensors of the rank, not in an engine")
        return self._window

    @property
    def staging_bytes(self) -> int:
        """Memory that the movement takes beside parameters: two areas each way."""
        return self._staging.numel() + self._target.staging_bytes

    def open_message(self) -> dict[str, Any]:
        """What shows the engine's receiver its window and rounds, once; JSON."""
        return {
            "op": "open",
            "path": self.window.path,
            "bytes": self.window.num_bytes,
            "area_bytes": self.window.area_bytes,
            "rounds": self.receiver_rounds(),
        }

    def update_message(self) -> dict[str, Any]:
        """What makes the receiver take the next :meth:`run`; JSON."""
        sequence = self.window.sequence + 1
        return {"op": "update", "sequence": sequence, "limit_s": self._limit_s}

    def receiver_rounds(self) -> dict[str, Any]:
        """What the engine's receiver must know of the rounds; JSON.

        ``writes[round]`` is a list of [parameter, box, offset in the area]; ``dtypes`` has those
        of parameters that are not of ``dtype``.
        """
        arriving = [list(round_.arriving) for round_ in self.plan.rounds]
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "dtypes": {
                p.transfer.param: p.transfer.dtype
                for placed in arriving
                for p in placed
                if p.transfer.dtype is not None
            },
            "device_handle": self.window.device_handle(),
            "padding": self._padding_params,
            "writes": [
                [[p.transfer.param, p.transfer.box, p.offset] for p in placed]
                for placed in arriving
            ],
        }

    def run(self, poll: Poll) -> MoveStats:
        """Move everything once. All ranks of the plan call it (point-to-point messages).

        Args:
            poll: called while waiting; what it raises ends the movement.

        Raises:
            RuntimeError: a peer or the receiver failed or was silent too long; names parameters,
                ranks and the round.
        """
        stats, begun = MoveStats(num_rounds=len(self.plan.rounds)), time.perf_counter()
        number = 0
        try:
            with _timed(stats, "write_s"):
                self._target.begin(poll)
            for number in range(len(self.plan.rounds)):
                self._run_round(number, stats, poll)
            self._packer.check()
            with _timed(stats, "write_s"):
                self._target.finish(poll)
        except (TransportError, ReceiverError, TimeoutError, ValueError) as error:
            self._target.abandon()
            raise RuntimeError(self._explain(error, number)) from error
        except BaseException:
            self._target.abandon()
            raise
        stats.total_s = time.perf_counter() - begun
        return stats

    def _run_round(self, number: int, stats: MoveStats, poll: Poll) -> None:
        round_ = self.plan.rounds[number]
        if number == 0:
            self._pack(number, stats)
        with _timed(stats, "write_s"):
            area = self._target.reserve(number, poll)
        self._transport.start(self._outgoing(number), _parcels(round_.incoming, area))
        with _timed(stats, "local_s"):
            for i, placed in enumerate(round_.local):
                view = self._target.local_view(number, i)
                self._packer.pack(placed.transfer, self._source(placed.transfer), view)
                stats.local_bytes += placed.num_bytes
        if number + 1 < len(self.plan.rounds):
            self._pack(number + 1, stats)
        with _timed(stats, "wire_s"):
            self._transport.wait(self._limit_s, poll)
        with _timed(stats, "write_s"):
            self._target.deliver(number)
        stats.received_bytes += sum(p.num_bytes for m in round_.incoming for p in m.parts)

    def _pack(self, number: int, stats: MoveStats) -> None:
        """Copy, and cast, a round's outgoing rectangles into their messages."""
        with _timed(stats, "pack_s"):
            messages = self.plan.rounds[number].outgoing
            for message, views in zip(messages, self._packed_views[number], strict=True):
                for placed, view in zip(message.parts, views, strict=True):
                    self._pack_part(placed, view, number)
                    stats.sent_bytes += placed.num_bytes

    def _outgoing(self, number: int) -> list[Parcel]:
        return _parcels(self.plan.rounds[number].outgoing, self._staging[number % 2])

    def _pack_part(self, placed: Placed, view: Tensor, number: int) -> None:
        """What leaves in round ``number``: of the rank's parameters, or of what came to it."""
        if placed.relayed_from is None:
            self._packer.pack(placed.transfer, self._source(placed.transfer), view)
            return
        came = replace(placed, offset=placed.relayed_from, relayed_from=None)
        view.copy_(part_view(self._target.area(number - RELAY_ROUNDS), came, self.dtype))

    def _source(self, transfer: Transfer) -> Tensor:
        return self._params[transfer.source_param].detach()[slices_of(transfer.source_box)]

    def _sources(self) -> Iterator[Transfer]:
        for round_ in self.plan.rounds:
            for placed in _leaving(round_):
                if placed.relayed_from is None:
                    yield placed.transfer

    def _explain(self, error: Exception, number: int) -> str:
        where = f"reshard, rank {self.plan.rank}, round {number} of {len(self.plan.rounds)}"
        if not isinstance(error, TransportError):
            return f"{where}: {error}"
        round_ = self.plan.rounds[number]
        parts = [
            placed.transfer
            for message in (*round_.incoming, *round_.outgoing)
            if message.peer == error.peer
            for placed in message.parts
        ]
        first = f", first {parts[0]}" if parts else ""
        return f"{where}: {error}; on their way were {len(parts)} transfers{first}"


def _leaving(round_: Round) -> Iterator[Placed]:
    """All that the rank reads from its parameters in a round."""
    for message in round_.outgoing:
        yield from message.parts
    yield from round_.local


def _parcels(messages: tuple[Any, ...], area: Tensor) -> list[Parcel]:
    return [(area[m.offset : m.offset + m.num_bytes], m.peer) for m in messages]


def _check_source(transfer: Transfer, params: Mapping[str, Tensor]) -> None:
    param = params.get(transfer.source_param)
    if param is None:
        raise RuntimeError(f"there is no parameter {transfer.source_param}; planned was {transfer}")
    fits = param.dim() == len(transfer.source_box) and all(
        stop <= size for (_, stop), size in zip(transfer.source_box, param.shape, strict=True)
    )
    if not fits:
        raise RuntimeError(
            f"rank {transfer.source}: {transfer.source_param} has shape {tuple(param.shape)}, too "
            f"small for {transfer}"
        )


@contextmanager
def _timed(stats: MoveStats, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        setattr(stats, name, getattr(stats, name) + time.perf_counter() - begun)
