"""Which rank sends what to which: bundles with their sources chosen. Pure.

Every rank computes the same plan from the same tables, so nothing is negotiated. Moved bytes equal
the lower bound (what each rank needs and does not hold, once), and so do the bytes between nodes
(what each node needs and does not hold, once): one rank gets it for its node and passes it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Far:
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
    sendings: list[Sending | None] = [None] * len(bundles)
    for i in sorted(range(len(bundles)), key=lambda i: -bundles[i].num_bytes):
        sendings[i] = chooser.choose(bundles[i])
    return ReshardPlan(spread, topology, itemsize, area_bytes, tuple(s for s in sendings if s))


class _Chooser:
    """Spreads what is sent over those that can send it."""

    def __init__(self, world: int, rails: Sequence[int], slack_bytes: int) -> None:
        self._sent = [0] * world
        self._rails = rails
        self._slack = slack_bytes
        self._turn = 0

    def add_certain(self, bundle: Bundle) -> None:
        """Count what has one sender only."""
        sent, size, flow = self._sent, bundle.num_bytes, bundle.flow
        for _, holders in flow.near:
            if len(holders) == 1:
                sent[holders[0]] += size
        if len(flow.holders) == 1:
            sent[flow.holders[0]] += size * len(flow.far)

    def choose(self, bundle: Bundle) -> Sending:
        flow, size = bundle.flow, bundle.num_bytes
        near = []
        for rank, holders in flow.near:
            source = holders[0]
            if len(holders) > 1:
                source = min(holders, key=self._sent.__getitem__)
                self._sent[source] += size
            near.append((source, rank))
        far = tuple(self._far(flow.holders, needers, size) for needers in flow.far)
        return Sending(bundle, tuple(near), far)

    def _far(self, holders: tuple[int, ...], needers: tuple[int, ...], size: int) -> Far:
        sent = self._sent
        source = holders[0]
        if len(holders) > 1:
            source = self._least(self._candidates(holders), needers)
            sent[source] += size
        if len(needers) == 1:
            return Far(source, needers[0], ())
        landing = self._least(needers, (source,))
        sent[landing] += size * (len(needers) - 1)
        return Far(source, landing, tuple(rank for rank in needers if rank != landing))

    def _candidates(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        if len(holders) <= MAX_CANDIDATES:
            return holders
        self._turn += MAX_CANDIDATES
        at = self._turn % len(holders)
        return (holders[at:] + holders[:at])[:MAX_CANDIDATES]

    def _least(self, ranks: tuple[int, ...], peers: tuple[int, ...]) -> int:
        """Who has sent the least; on the rail of a peer if that is about as good."""
        sent, rails = self._sent, self._rails
        best = min(ranks, key=sent.__getitem__)
        wanted = {rails[peer] for peer in peers}
        if rails[best] in wanted:
            return best
        same_rail = [rank for rank in ranks if rails[rank] in wanted]
        if not same_rail:
            return best
        other = min(same_rail, key=sent.__getitem__)
        return other if sent[other] <= sent[best] + self._slack else best
