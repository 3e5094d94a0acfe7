"""One rank's share of a plan: the messages of its rounds, byte by byte. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhf.reshard.plan import ReshardPlan, plan
from rlhf.reshard.rounds import MAX_PEERS, Area, Rows, assign_rounds
from rlhf.reshard.topology import Topology
from rlhf.reshard.wire import align
from rlhf.weights.piece import FLOAT8, ITEMSIZES, Box, box_size, show_box
from rlhf.weights.spread import EXPERT, Key, Place, Run, Seating, Spread


@dataclass(frozen=True, slots=True)
class Transfer:
    """``param[box]`` of the destination takes its values from ``source_param[source_box]``.

    Of what a rank passes on, the source is its own destination parameter.
    """

    tensor: str
    source: int
    source_param: str
    source_box: Box
    destination: int
    param: str
    box: Box
    num_elements: int
    itemsize: int  # bytes per element in the destination's dtype
    dtype: str | None  # of the destination, where it is not the model's
    form: Literal["plain", "weight", "scale"] = "plain"
    """The other two: block fp8, or its scales, are to be computed from the source's values."""
    transposed: bool = False
    """Rows of the source's rectangle are columns of ``box``."""

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    def __str__(self) -> str:
        return (
            f"{self.tensor}: rank {self.source} {self.source_param}{show_box(self.source_box)} -> "
            f"rank {self.destination} {self.param}{show_box(self.box)}"
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A transfer whose bytes lie at [offset, offset + num_bytes) of an area."""

    transfer: Transfer
    offset: int
    num_bytes: int
    relayed_from: int | None = None
    """Where its bytes lie in the incoming area of RELAY_ROUNDS rounds before."""
    is_relay: bool = False
    """Its source passes on what came to it; seen from both ends."""


@dataclass(frozen=True, slots=True)
class Message:
    """Contiguous bytes [offset, offset + num_bytes) of an area that go to or come from ``peer``."""

    peer: int
    offset: int
    num_bytes: int
    parts: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's share of a round; ``local`` lies in the plan's local area behind the messages."""

    incoming: tuple[Message, ...]
    outgoing: tuple[Message, ...]
    local: tuple[Placed, ...]

    @property
    def arriving(self) -> Iterator[Placed]:
        """All that the rank gets in the round; with a local area of incoming bytes by offset."""
        for message in self.incoming:
            yield from message.parts
        yield from self.local

    @property
    def leaving(self) -> Iterator[Placed]:
        """All that the rank gives in the round, relayed parts included."""
        for message in self.outgoing:
            yield from message.parts
        yield from self.local


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a plan."""

    rank: int
    itemsize: int  # of transfers without a dtype of their own
    rounds: tuple[Round, ...]
    incoming_area_bytes: int  # largest round
    outgoing_area_bytes: int
    local_area: Area = "incoming"

    @property
    def num_arriving(self) -> int:
        """Transfers that the rank's destination takes in, of all rounds."""
        return sum(1 for round_ in self.rounds for _ in round_.arriving)


def rank_plan(
    spread: Spread,
    topology: Topology,
    rank: int,
    *,
    itemsize: int,
    area_bytes: int,
    max_peers: int = MAX_PEERS,
    local_area: Area = "incoming",
) -> RankPlan:
    """The rounds of ``rank``.

    Args:
        itemsize: bytes per element at the destination, for places without a dtype of their own.
        area_bytes: no rank's incoming or outgoing bytes of a round exceed it.
        max_peers: nor does it send to or receive from more ranks in one.
        local_area: on the side of the engine; "outgoing" where that is the source.

    Raises:
        ValueError: something is needed and held by no rank; the area is too small.
    """
    made = plan(spread, topology, itemsize, area_bytes)
    return share(made, assign_rounds(made, max_peers, local_area), rank)


def rank_plans(
    spread: Spread,
    topology: Topology,
    *,
    itemsize: int,
    area_bytes: int,
    max_peers: int = MAX_PEERS,
    local_area: Area = "incoming",
) -> list[RankPlan]:
    """The rounds of all ranks."""
    made = plan(spread, topology, itemsize, area_bytes)
    rows = assign_rounds(made, max_peers, local_area)
    return [share(made, rows, rank) for rank in range(spread.world)]


def share(made: ReshardPlan, rows: Rows, rank: int) -> RankPlan:
    """What ``rank`` does of the plan's rows."""
    mine = _Share(made, rank)
    for i in _rows_of(rows, rank):
        mine.add(rows.bundle[i], rows.source[i], rows.destination[i], rows.round[i])
    return mine.rank_plan(rows.num_rounds, rows.local_area)


def _rows_of(rows: Rows, rank: int) -> Sequence[int]:
    sources, ranks = (np.frombuffer(column, "l") for column in (rows.source, rows.destination))
    found: list[int] = np.flatnonzero((sources == rank) | (ranks == rank)).tolist()
    return found


_Row = tuple[int, int, int]  # sending, source, destination


class _Share:
    """Collects one rank's rows and lays them out."""

    def __init__(self, made: ReshardPlan, rank: int) -> None:
        self._made = made
        self._rank = rank
        self._incoming: dict[int, dict[int, list[_Row]]] = defaultdict(lambda: defaultdict(list))
        self._outgoing: dict[int, dict[int, list[_Row]]] = defaultdict(lambda: defaultdict(list))
        self._came_to: dict[int, int] = {}  # sending -> its offset in its round's incoming area

    def add(self, sending: int, source: int, destination: int, number: int) -> None:
        row = (sending, source, destination)
        if destination == self._rank:
            self._incoming[number][source].append(row)
        else:
            self._outgoing[number][destination].append(row)

    def rank_plan(self, num_rounds: int, local_area: Area) -> RankPlan:
        rounds, in_peak, out_peak = [], 0, 0
        for number in range(num_rounds):
            arriving = self._incoming.get(number, {})
            local = arriving.pop(self._rank, [])
            messages, in_bytes = self._messages(arriving)
            sent, out_bytes = self._messages(self._outgoing.get(number, {}))
            if local_area == "incoming":
                placed, in_bytes = self._place(local, in_bytes)
            else:
                placed, out_bytes = self._place(local, out_bytes)
            rounds.append(Round(messages, sent, placed))
            in_peak, out_peak = max(in_peak, in_bytes), max(out_peak, out_bytes)
        return RankPlan(
            self._rank, self._made.itemsize, tuple(rounds), in_peak, out_peak, local_area
        )

    def _messages(self, by_peer: dict[int, list[_Row]]) -> tuple[tuple[Message, ...], int]:
        """Messages back to back, peers ascending; and where they end."""
        out, at = [], 0
        for peer in sorted(by_peer):
            parts, end = self._place(by_peer[peer], at)
            out.append(Message(peer, at, end - at, parts))
            at = end
        return tuple(out), at

    def _place(self, rows: Sequence[_Row], at: int) -> tuple[tuple[Placed, ...], int]:
        """Aligned places from ``at`` on, and where they end."""
        out = []
        for sending, source, destination in rows:
            relay = self._came_to.get(sending) if destination != self._rank else None
            start = at
            is_relay = source not in self._made.sendings[sending].bundle.flow.holders
            for transfer in _transfers(self._made, sending, source, destination):
                from_ = None if relay is None else relay + at - start
                out.append(Placed(transfer, at, transfer.num_bytes, from_, is_relay))
                at += align(transfer.num_bytes)
            if destination == self._rank and source != destination:
                self._came_to[sending] = start
        return tuple(out), at


def _transfers(
    made: ReshardPlan, sending: int, source: int, destination: int
) -> Iterator[Transfer]:
    bundle, spread = made.sendings[sending].bundle, made.spread
    run, is_holder = bundle.run, source in bundle.flow.holders
    seating, key = (spread.source, run.source) if is_holder else _destination(spread, run)
    pairs = [
        (
            atom,
            _place_on(source, atom.source if is_holder else atom.destination, seating, key),
            _place_on(destination, atom.destination, *_destination(spread, run)),
        )
        for atom in bundle.atoms
    ]
    for instance in run.instances[bundle.first : bundle.stop]:
        # who is no holder passes on what came to itself
        at, to = instance.source if is_holder else instance.destination, instance.destination
        for atom, place, target in pairs:
            yield Transfer(
                tensor=instance.prefix + atom.name.replace(EXPERT, str(instance.expert)),
                source=source,
                source_param=at.param(place),
                source_box=at.box(place, atom.region),
                destination=destination,
                param=to.param(target),
                box=to.box(target, atom.region),
                num_elements=box_size(atom.region),
                itemsize=made.itemsize if target.dtype is None else ITEMSIZES[target.dtype],
                dtype=target.dtype,
                form=_form(place, target) if is_holder else "plain",
                transposed=place.transposed != target.transposed,
            )


def _form(source: Place, destination: Place) -> Literal["plain", "weight", "scale"]:
    if source.scales:
        return "scale"
    return "weight" if destination.dtype == FLOAT8 != source.dtype else "plain"


def _destination(spread: Spread, run: Run) -> tuple[Seating, Key]:
    return spread.destination, run.destination


def _place_on(rank: int, places: tuple[Place, ...], seating: Seating, key: Key) -> Place:
    """The place that is on ``rank``, of several."""
    if len(places) == 1:
        return places[0]
    return next(place for place in places if rank in seating.ranks(place.seats, key))
