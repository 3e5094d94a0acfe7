"""A plan cut into rounds that fit a staging area, and one rank's share of them. Pure.

In a round each rank sends at most one contiguous message to each peer. What arrives (and what the
rank copies from itself) fits its incoming area, what it sends fits its outgoing area. All ranks
compute the same rounds, so both ends of a message know its layout.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf.reshard.plan import ReshardPlan, Transfer
from rlhf.reshard.wire import ALIGN_BYTES, align
from rlhf.weights.piece import Box

SPLITS_PER_AREA = 4
"""A transfer takes at most this part of an area, so that rounds fill up."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A transfer whose bytes lie at [offset, offset + num_bytes) of an area."""

    transfer: Transfer
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Contiguous bytes [offset, offset + num_bytes) of an area that go to or come from ``peer``."""

    peer: int
    offset: int
    num_bytes: int
    parts: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's share of a round; ``local`` lies in the incoming area behind the messages."""

    incoming: tuple[Message, ...]
    outgoing: tuple[Message, ...]
    local: tuple[Placed, ...]

    @property
    def arriving(self) -> Iterator[Placed]:
        """All that lies in the incoming area at the end of the round, by offset."""
        for message in self.incoming:
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


_Item = tuple[int, Transfer]  # (round, transfer)


def rank_plan(plan: ReshardPlan, rank: int, area_bytes: int) -> RankPlan:
    """The rounds of ``rank``.

    Args:
        area_bytes: no rank's incoming or outgoing bytes of a round exceed it.

    Raises:
        ValueError: the area is too small.
    """
    return rank_plans(plan, [rank], area_bytes)[0]


def rank_plans(plan: ReshardPlan, ranks: Sequence[int], area_bytes: int) -> list[RankPlan]:
    """The rounds of several ranks."""
    smallest = SPLITS_PER_AREA * ALIGN_BYTES
    if area_bytes < smallest:
        raise ValueError(f"a staging area of {area_bytes} bytes is below the least, {smallest}")
    assigned = _assign_rounds(plan, area_bytes)
    num_rounds = 1 + max((number for number, _ in assigned), default=-1)
    return [_share(plan, assigned, num_rounds, rank) for rank in ranks]


def _assign_rounds(plan: ReshardPlan, area_bytes: int) -> list[_Item]:
    """First round with room at both ends, for all transfers in the order of their progress."""
    limit = area_bytes // SPLITS_PER_AREA // ALIGN_BYTES * ALIGN_BYTES
    used_in: list[list[int]] = [[] for _ in range(plan.world)]
    used_out: list[list[int]] = [[] for _ in range(plan.world)]
    first_in, first_out = [0] * plan.world, [0] * plan.world
    nearly_full = area_bytes - area_bytes // 64
    out: list[_Item] = []
    for transfer in _in_order(plan, limit):
        size = align(transfer.num_bytes)
        ends = [(used_in[transfer.destination], first_in, transfer.destination)]
        if transfer.source != transfer.destination:
            ends.append((used_out[transfer.source], first_out, transfer.source))
        number = max(first[rank] for _, first, rank in ends)
        while any(number < len(used) and used[number] + size > area_bytes for used, _, _ in ends):
            number += 1
        for used, first, rank in ends:
            used.extend([0] * (number + 1 - len(used)))
            used[number] += size
            while first[rank] < len(used) and used[first[rank]] >= nearly_full:
                first[rank] += 1
        out.append((number, transfer))
    return out


def _in_order(plan: ReshardPlan, limit_bytes: int) -> Iterator[Transfer]:
    """Transfers by how much of their destination's local or remote bytes goes before them.

    So every round has its part of both, and the wire works while the rank copies. A destination
    takes its sources in turn, starting behind its own rank: no source is asked by all at once.
    """
    queues: dict[tuple[int, bool], list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        local = transfer.source == transfer.destination
        queues[transfer.destination, local] += _split(transfer, limit_bytes)
    streams = []
    for (destination, local), transfers in sorted(queues.items()):
        if not local:
            transfers.sort(key=lambda t, d=destination: (t.source - d) % plan.world)  # type: ignore[misc]
        streams.append(_with_progress(transfers, destination, local))
    for *_, transfer in heapq.merge(*streams, key=lambda item: item[:4]):
        yield transfer


def _with_progress(
    transfers: list[Transfer], destination: int, local: bool
) -> Iterator[tuple[float, int, bool, int, Transfer]]:
    total = sum(t.num_elements for t in transfers)
    before = 0
    for i, transfer in enumerate(transfers):
        yield before / total, destination, local, i, transfer
        before += transfer.num_elements


def _split(transfer: Transfer, limit_bytes: int) -> list[Transfer]:
    """The transfer in parts of at most ``limit_bytes``, cut along its outer dims."""
    if transfer.num_bytes <= limit_bytes:
        return [transfer]
    sizes = [stop - start for start, stop in transfer.box]
    dim = next(i for i, size in enumerate(sizes) if size > 1)
    per_index = math.prod(sizes[dim + 1 :])
    step = max(1, limit_bytes // transfer.itemsize // per_index)
    from_end = len(sizes) - dim
    parts = [
        replace(
            transfer,
            box=_narrow(transfer.box, from_end, begin, min(begin + step, sizes[dim])),
            source_box=_narrow(transfer.source_box, from_end, begin, min(begin + step, sizes[dim])),
            num_elements=per_index * (min(begin + step, sizes[dim]) - begin),
        )
        for begin in range(0, sizes[dim], step)
    ]
    return [small for part in parts for small in _split(part, limit_bytes)]


def _narrow(box: Box, from_end: int, begin: int, end: int) -> Box:
    """Indices [begin, end) of the box's dim that is ``from_end``-th from the end."""
    dim = len(box) - from_end
    start = box[dim][0]
    return (*box[:dim], (start + begin, start + end), *box[dim + 1 :])


def _share(plan: ReshardPlan, assigned: list[_Item], num_rounds: int, rank: int) -> RankPlan:
    incoming: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_rounds)]
    outgoing: list[dict[int, list[Transfer]]] = [defaultdict(list) for _ in range(num_rounds)]
    for number, transfer in assigned:
        if transfer.destination == rank:
            incoming[number][transfer.source].append(transfer)
        elif transfer.source == rank:
            outgoing[number][transfer.destination].append(transfer)
    rounds, in_peak, out_peak = [], 0, 0
    for arriving, leaving in zip(incoming, outgoing, strict=True):
        local = arriving.pop(rank, [])
        messages, at = _messages(arriving)
        placed, in_bytes = _place(local, at)
        sent, out_bytes = _messages(leaving)
        rounds.append(Round(messages, sent, placed))
        in_peak, out_peak = max(in_peak, in_bytes), max(out_peak, out_bytes)
    return RankPlan(rank, plan.itemsize, tuple(rounds), in_peak, out_peak)


def _messages(by_peer: dict[int, list[Transfer]]) -> tuple[tuple[Message, ...], int]:
    """Messages back to back, peers ascending; and where they end."""
    out, at = [], 0
    for peer in sorted(by_peer):
        parts, end = _place(by_peer[peer], at)
        out.append(Message(peer, at, end - at, parts))
        at = end
    return tuple(out), at


def _place(transfers: Sequence[Transfer], at: int) -> tuple[tuple[Placed, ...], int]:
    """Aligned places from ``at`` on, and where they end."""
    out = []
    for transfer in transfers:
        out.append(Placed(transfer, at, transfer.num_bytes))
        at += align(transfer.num_bytes)
    return tuple(out), at
