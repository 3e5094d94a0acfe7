"""Which rank sends what to which: bundles with their sources chosen. Pure.

Every rank computes the same plan from the same tables, so nothing is negotiated. Moved bytes equal
the lower bound (what each rank needs and does not hold, once), and so do the bytes between nodes
(what each node needs and does not hold, once): one rank gets it for its node and passes it on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlhf.reshard.bundles import Bundle, bundles_of
from rlhf.reshard.topology import Topology
from rlhf.reshard.wire import ALIGN_BYTES
from rlhf.weights.spread import Spread

BUNDLES_PER_AREA = 4
"""A bundle takes at most this part of an area, so that rounds fill up."""
MIN_AREA_BYTES = BUNDLES_PER_AREA * ALIGN_BYTES

MAX_CANDIDATES = 8
"""Of many equal holders so many are looked at, others the next time."""
RAIL_SLACK = 0.005
"""A holder on the same rail may have sent more than another, by this part of the mean."""


class Far(NamedTuple):
    """A copy from another node; ``landing`` passes it on to ``others`` of its node."""

    source: int
    landing: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sending:
    """The copies of one bundle; those of the rank from itself are in its flow."""

    bundle: Bundle
    near: tuple[tuple[int, int], ...]  # source, destination on the same node
    far: tuple[Far, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """A movement of weights between two layouts."""

    spread: Spread
    topology: Topology
    itemsize: int  # bytes per element in the model's dtype at the destination
    area_bytes: int
    """No rank's incoming or outgoing bytes of a round may exceed it."""
    sendings: tuple[Sending, ...]

    @property
    def world(self) -> int:
        return self.spread.world


def plan(spread: Spread, topology: Topology, itemsize: int, area_bytes: int) -> ReshardPlan:
    """Choose a source for everything that is needed. Deterministic.

    A rank takes it from itself, else from its node, else from far, there from the same rail if
    that costs no balance; among equals from the one that sends the fewest bytes.

    Args:
        itemsize: bytes per element at the destination, for places without a dtype of their own.

    Raises:
        ValueError: something is needed and held by no source rank; the area is too small.
    """
    if len(topology.nodes) != spread.world:
        raise ValueError(
            f"{spread.world} ranks move weights, the topology has {len(topology.nodes)}"
        )
    if area_bytes < MIN_AREA_BYTES:
        raise ValueError(
            f"a staging area of {area_bytes} bytes is below the least, {MIN_AREA_BYTES}"
        )
    limit = area_bytes // BUNDLES_PER_AREA // ALIGN_BYTES * ALIGN_BYTES
    bundles = list(bundles_of(spread, topology, itemsize, limit))
    moved = sum(bundle.num_bytes * bundle.flow.num_moved for bundle in bundles)
    chooser = _Chooser(spread.world, topology.rails, int(RAIL_SLACK * moved / spread.world))
    for bundle in bundles:
        chooser.add_certain(bundle)
    largest_first = sorted(range(len(bundles)), key=lambda i: -bundles[i].num_bytes)
    chosen = {i: chooser.choose(bundles[i]) for i in largest_first}
    sendings = tuple(chosen[i] for i in range(len(bundles)))
    return ReshardPlan(spread, topology, itemsize, area_bytes, sendings)


class _Chooser:
    """Spreads what is sent over those that can send it."""

    def __init__(self, world: int, rails: Sequence[int], slack_bytes: int) -> None:
        self._sent = [0] * world
        self._rails = rails
        self._slack = slack_bytes
        self._turn = 0
        self._on_rail: dict[tuple[int, ...], dict[int, list[int]]] = {}

    def add_certain(self, bundle: Bundle) -> None:
        """Count what has one sender only."""
        sent, size, flow = self._sent, bundle.num_bytes, bundle.flow
        for _, holders in flow.near:
            if len(holders) == 1:
                sent[holders[0]] += size
        if len(flow.holders) == 1:
            sent[flow.holders[0]] += size * len(flow.far)

    def choose(self, bundle: Bundle) -> Sending:
        flow, size, sent = bundle.flow, bundle.num_bytes, self._sent
        near = []
        for rank, holders in flow.near:
            source = holders[0]
            if len(holders) > 1:
                source = min(holders, key=sent.__getitem__)
                sent[source] += size
            near.append((source, rank))
        far = []
        holders = flow.holders
        for needers in flow.far:
            source = holders[0]
            if len(holders) > 1:
                source = self._least(self._some(holders), self._by_rail(needers))
                sent[source] += size
            landing = needers[0]
            others: tuple[int, ...] = ()
            if len(needers) > 1:
                landing = self._least(needers, (self._rails[source],))
                others = tuple([rank for rank in needers if rank != landing])
                sent[landing] += size * len(others)
            far.append(Far(source, landing, others))
        return Sending(bundle, tuple(near), tuple(far))

    def _some(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        """At most MAX_CANDIDATES of them."""
        if len(holders) <= MAX_CANDIDATES:
            return holders
        self._turn += MAX_CANDIDATES
        at = self._turn % len(holders)
        some = holders[at : at + MAX_CANDIDATES]
        return some + holders[: MAX_CANDIDATES - len(some)]

    def _by_rail(self, ranks: tuple[int, ...]) -> dict[int, list[int]]:
        """Rail -> those of ``ranks`` on it."""
        found = self._on_rail.get(ranks)
        if found is None:
            found = self._on_rail[ranks] = {}
            for rank in ranks:
                found.setdefault(self._rails[rank], []).append(rank)
        return found

    def _least(self, ranks: tuple[int, ...], wanted: Collection[int]) -> int:
        """Who has sent the least; on a rail of ``wanted`` if that is about as good."""
        sent, rails = self._sent, self._rails
        best = min(ranks, key=sent.__getitem__)
        if rails[best] in wanted:
            return best
        on_rail = self._by_rail(ranks)
        same_rail = [rank for rail in wanted for rank in on_rail.get(rail, ())]
        if not same_rail:
            return best
        other = min(same_rail, key=sent.__getitem__)
        return other if sent[other] <= sent[best] + self._slack else best
