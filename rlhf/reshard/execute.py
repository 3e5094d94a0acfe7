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

from rlhf.reshard.pack import part_view
from rlhf.reshard.polling import Poll
from rlhf.reshard.rounds import RELAY_ROUNDS
from rlhf.reshard.schedule import RankPlan
from rlhf.reshard.sources import EngineSource, Source, TensorSource, relayed
from rlhf.reshard.targets import EngineTarget, Target, TensorTarget, incoming_bytes
from rlhf.reshard.transport import Parcel, Transport, TransportError
from rlhf.reshard.verify import Verifier
from rlhf.reshard.windows import ReceiverError, Window


@dataclass(slots=True)
class MoveStats:
    """One movement on one rank. ``*_s`` are seconds of this rank's own thread."""

    num_rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    local_bytes: int = 0
    pack_s: float = 0.0  # parameters into outgoing messages, or waiting for the engine's
    local_s: float = 0.0  # parameters into the rank's own destination
    wire_s: float = 0.0  # waiting for peers
    write_s: float = 0.0  # waiting for the receiver, or writing tensors
    verify_s: float = 0.0  # looking for NaN and infinities; checksums, exchanged and compared
    total_s: float = 0.0
    faults: tuple[str, ...] = ()
    """What a verification found; the weights must not be used then, on any rank."""


class Mover:
    """Moves what a rank's share of a plan says, once per :meth:`run`."""

    def __init__(
        self,
        rank_plan: RankPlan,
        source: Window | Mapping[str, Tensor],
        transport: Transport,
        target: Window | Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        limit_s: float = 120.0,
        padding_params: Collection[str] = (),
        staging: Tensor | None = None,
    ) -> None:
        """
        Args:
            source: this rank's parameters, looked up afresh in each run; or the window to an
                engine that gives its own.
            target: the window to an engine, or tensors to fill in place.
            dtype: dtype of the bytes on their way, which is the destination's; a transfer's own
                goes before it.
            limit_s: longest wait for a peer or for the receiver.
            padding_params: the engine's parameters that hold nothing but vocabulary padding on
                this rank; any other that the plan does not write is refused by the receiver.
            staging: [2, bytes] uint8, the rank's own two areas, on the side that is not an
                engine's; a movement back may share them and the window. None: as large as needed.

        Raises:
            RuntimeError: a parameter is missing or too small, or an area is too small.
        """
        if dtype.itemsize != rank_plan.itemsize:
            raise RuntimeError(
                f"the plan counts {rank_plan.itemsize} bytes per element, {dtype} has "
                f"{dtype.itemsize}"
            )
        self.plan = rank_plan
        self.dtype = dtype
        self._transport = transport
        self._limit_s = limit_s
        self._padding_params = sorted(padding_params)
        self._verifier: Verifier | None = None
        sides = [side for side in (source, target) if isinstance(side, Window)]
        self._window = sides[0] if sides else None
        self._source: Source
        if isinstance(source, Window):
            self._source = EngineSource(rank_plan, source, dtype, limit_s)
        else:
            areas = _areas(rank_plan.outgoing_area_bytes, staging, transport.device)
            self._source = TensorSource(rank_plan, source, dtype, areas)
        self._target: Target
        if isinstance(target, Window):
            self._target = EngineTarget(rank_plan, target, dtype, limit_s)
        else:
            shared = staging if isinstance(source, Window) else None
            areas = _areas(incoming_bytes(rank_plan), shared, transport.device)
            self._target = TensorTarget(rank_plan, target, dtype, areas)

    @property
    def window(self) -> Window:
        """The window to the engine.

        Raises:
            RuntimeError: neither end is an engine.
        """
        if self._window is None:
            raise RuntimeError("this movement ends in tensors of the rank, not in an engine")
        return self._window

    @property
    def staging_bytes(self) -> int:
        """Memory that the movement takes beside parameters: two areas each way."""
        return self._source.staging_bytes + self._target.staging_bytes

    def open_message(self, back: Mover | None = None) -> dict[str, Any]:
        """What shows the engine's receiver its window and rounds, once; JSON.

        Args:
            back: the movement out of the same engine through the same window.
        """
        return {
            "op": "open",
            "path": self.window.path,
            "bytes": self.window.num_bytes,
            "area_bytes": self.window.area_bytes,
            "sums_at": self.window.sums_at,
            "rounds": self.receiver_rounds(),
            "back": None if back is None else back.receiver_reads(),
        }

    def update_message(self, *, verify: bool = False) -> dict[str, Any]:
        """What makes the receiver take, or give, the next :meth:`run`; JSON.

        Args:
            verify: that run verifies; only what goes into an engine can.

        Raises:
            RuntimeError: the window has no room for the checksums.
        """
        message = {"sequence": self.window.sequence + 1, "limit_s": self._limit_s}
        if isinstance(self._source, EngineSource):
            assert not verify
            return {"op": "read", **message}
        room, needed = len(self.window.sums), self.plan.num_arriving
        if verify and room < needed:
            raise RuntimeError(
                f"rank {self.plan.rank}: verifying takes {needed} checksums, the window has room "
                f"for {room}; make it with as many"
            )
        return {"op": "update", **message, "verify": verify}

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

    def receiver_reads(self) -> dict[str, Any]:
        """What the engine's receiver must know of a movement out of it; JSON.

        ``reads[round]`` is a list of [parameter, box, offset in the area, dtype or None];
        ``dtype`` is that of the bytes where a read has none of its own.

        Raises:
            RuntimeError: the source is not an engine.
        """
        if not isinstance(self._source, EngineSource):
            raise RuntimeError("this movement begins in tensors of the rank, not in an engine")
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "reads": self._source.reads()}

    def run(self, poll: Poll, *, verify: bool = False) -> MoveStats:
        """Move everything once. All ranks of the plan call it (point-to-point messages).

        Args:
            poll: called while waiting; what it raises ends the movement.
            verify: compare what the engine holds with what was sent; equal on all ranks. What is
                found is in the statistics, so that all ranks may hear of it before one stops. That
                an engine gets NaN or infinite elements is found always.

        Raises:
            RuntimeError: a peer or the receiver failed or was silent too long; names parameters,
                ranks and the round.
        """
        stats, begun = MoveStats(num_rounds=len(self.plan.rounds)), time.perf_counter()
        verifier = self._begin_verifier(verify) if isinstance(self._target, EngineTarget) else None
        number = 0
        try:
            with _timed(stats, "write_s"):
                self._source.begin(poll)
                self._target.begin(poll)
            for number in range(len(self.plan.rounds)):
                self._run_round(number, stats, poll, verifier)
            if verifier is not None:
                with _timed(stats, "verify_s"):
                    verifier.exchange(self._transport, self._limit_s, poll)
            with _timed(stats, "write_s"):
                self._source.finish(poll)
                self._target.finish(poll)
        except (TransportError, ReceiverError, TimeoutError, ValueError) as error:
            self._abandon()
            raise RuntimeError(self._explain(error, number)) from error
        except BaseException:
            self._abandon()
            raise
        if verifier is not None:
            with _timed(stats, "verify_s"):
                stats.faults = verifier.faults(self.window.sums)
        stats.total_s = time.perf_counter() - begun
        return stats

    def _abandon(self) -> None:
        self._source.abandon()
        self._target.abandon()

    def _begin_verifier(self, verify: bool) -> Verifier:
        if self._verifier is None:
            self._verifier = Verifier(self.plan, self._transport.device, self.dtype)
        self._verifier.begin(sums=verify)
        return self._verifier

    def _run_round(
        self, number: int, stats: MoveStats, poll: Poll, verifier: Verifier | None
    ) -> None:
        round_ = self.plan.rounds[number]
        if number == 0:
            self._pack(number, stats, verifier)
        with _timed(stats, "write_s"):
            area = self._target.reserve(number, poll)
        with _timed(stats, "pack_s"):
            self._source.wait_packed(number, poll)
        outgoing = _parcels(round_.outgoing, self._source.area(number))
        self._transport.start(outgoing, _parcels(round_.incoming, area))
        with _timed(stats, "local_s"):
            for i, placed in enumerate(round_.local):
                self._source.copy_local(number, i, self._target.local_view(number, i))
                stats.local_bytes += placed.num_bytes
        if verifier is not None:
            with _timed(stats, "verify_s"):
                verifier.sum_local(number, area)
        if number + 1 < len(self.plan.rounds):
            self._pack(number + 1, stats, verifier)
        with _timed(stats, "wire_s"):
            self._transport.wait(self._limit_s, poll)
        with _timed(stats, "write_s"):
            self._source.release(number)
            self._target.deliver(number)
        stats.sent_bytes += sum(p.num_bytes for m in round_.outgoing for p in m.parts)
        stats.received_bytes += sum(p.num_bytes for m in round_.incoming for p in m.parts)

    def _pack(self, number: int, stats: MoveStats, verifier: Verifier | None) -> None:
        """What leaves in round ``number``: of the source, or of what came to the rank."""
        with _timed(stats, "pack_s"):
            self._source.pack(number)
            for placed in relayed(self.plan, number):
                assert placed.relayed_from is not None
                came = replace(placed, offset=placed.relayed_from, relayed_from=None)
                values = part_view(self._target.area(number - RELAY_ROUNDS), came, self.dtype)
                part_view(self._source.area(number), placed, self.dtype).copy_(values)
        if verifier is not None:
            with _timed(stats, "verify_s"):
                verifier.sum_outgoing(number, self._source.area(number))

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


def _parcels(messages: tuple[Any, ...], area: Tensor) -> list[Parcel]:
    return [(area[m.offset : m.offset + m.num_bytes], m.peer) for m in messages]


def _areas(num_bytes: int, shared: Tensor | None, device: torch.device) -> Tensor:
    """[2, at least ``num_bytes``] uint8."""
    if shared is None:
        return torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    if shared.shape[1] < num_bytes:
        raise RuntimeError(
            f"rounds take up to {num_bytes} bytes, an area of the rank's own has {shared.shape[1]}"
        )
    return shared


@contextmanager
def _timed(stats: MoveStats, name: str) -> Iterator[None]:
    begun = time.perf_counter()
    try:
        yield
    finally:
        setattr(stats, name, getattr(stats, name) + time.perf_counter() - begun)
