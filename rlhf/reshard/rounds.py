"""In which round each copy travels, for all ranks. Pure.

In a round a rank sends at most one message to each peer. What arrives fits its incoming area, what
it sends fits its outgoing area, and what it copies from itself takes room in one of the two. What a
rank passes on to its node leaves two rounds after it came: it is packed out of the incoming area
before that is used again.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.reshard.bundles import Bundle
from rlhf.reshard.plan import Far, ReshardPlan

MAX_PEERS = 64
GROWTH = 16
"""Rounds that are added at a time beyond the one that is needed."""
RELAY_ROUNDS = 2
"""Rounds between a copy's arrival on a node and its being passed on."""

Area = Literal["incoming", "outgoing"]
"""Where a rank's copies from itself lie on their way: on the side of the engine, whose process
takes them from there or puts them there."""


@dataclass(frozen=True)
class Rows:
    """All copies of a movement: one element each, in the order of their places in messages."""

    bundle: array[int]  # index of the plan's sending
    source: array[int]
    destination: array[int]
    round: array[int]
    is_relay: array[int]  # 1: the source passes on what came to it RELAY_ROUNDS rounds before
    num_rounds: int
    local_area: Area


def assign_rounds(
    plan: ReshardPlan, max_peers: int = MAX_PEERS, local_area: Area = "incoming"
) -> Rows:
    """The first round with room at both ends, bundle by bundle as the movement goes on.

    Args:
        max_peers: a rank sends to and receives from at most so many others in a round.
        local_area: the area in which copies from the rank itself take room.

    Raises:
        ValueError: something is too large for an area, or goes to more ranks than ``max_peers``.
    """
    rounds = _Rounds(plan, max_peers, local_area)
    order = sorted(range(len(plan.sendings)), key=lambda i: plan.sendings[i].bundle.middle)
    for i in order:
        sending = plan.sendings[i]
        size = sending.bundle.area_bytes
        _check_size(sending.bundle, plan.area_bytes, max_peers)
        for rank in sending.bundle.flow.local:
            rounds.add_local(i, rank, size)
        rounds.add_pairs(i, sending.near, size)
        rounds.add_pairs(i, [(f.source, f.landing) for f in sending.far if not f.others], size)
        for far in sending.far:
            if far.others:
                rounds.add_relayed(i, far, size)
    return rounds.rows()


def _check_size(bundle: Bundle, area_bytes: int, max_peers: int) -> None:
    fan_out = bundle.flow.fan_out
    if bundle.area_bytes * max(1, fan_out) > area_bytes:
        raise ValueError(
            f"a staging area of {area_bytes} bytes is too small: {bundle.area_bytes} bytes of "
            f"{bundle.run.instances[0].prefix}{bundle.atoms[0].name} go to {max(1, fan_out)} ranks "
            "at once; make the window larger"
        )
    if fan_out > max_peers:
        raise ValueError(
            f"max_peers={max_peers} is too small: {bundle.run.instances[0].prefix}"
            f"{bundle.atoms[0].name} goes to {fan_out} ranks of a node; allow as many"
        )


class _Load:
    """Room at one end, by rank and round: bytes, and copies.

    ``open_rounds`` remembers which rounds may still have room for copies of a size: an integer of
    endless bits for each rank, of which those are cleared that have been found full. Nothing is
    ever taken away, so a round that is full stays full.
    """

    def __init__(self, world: int, area_bytes: int, max_copies: int) -> None:
        self.left: list[list[int]] = [[] for _ in range(world)]
        """Bytes; below zero once there is no room for another copy, however small."""
        self._copies: list[list[int]] = [[] for _ in range(world)]  # that still have room
        self._area = area_bytes
        self._max_copies = max_copies
        self._open: dict[tuple[int, int], list[int]] = {}

    def open_rounds(self, size: int, copies: int = 1) -> list[int]:
        """By rank: bit n is clear if round n has no room for ``copies`` of ``size``."""
        found = self._open.get((size, copies))
        if found is None:
            found = self._open[size, copies] = [-1] * len(self.left)
        return found

    def grow(self, num_rounds: int) -> None:
        """Empty rounds at the end, up to ``num_rounds``."""
        for left, copies in zip(self.left, self._copies, strict=True):
            more = num_rounds - len(left)
            left += [self._area] * more
            copies += [self._max_copies] * more

    def has_room(self, rank: int, number: int, size: int, copies: int) -> bool:
        return self.left[rank][number] >= copies * size and self._copies[rank][number] >= copies

    def take(self, rank: int, number: int, size: int) -> None:
        copies = self._copies[rank]
        copies[number] -= 1
        self.left[rank][number] -= size if copies[number] else self._area + 1


class _Rounds:
    """Where copies are put."""

    def __init__(self, plan: ReshardPlan, max_peers: int, local_area: Area) -> None:
        # Copies are counted, of which two may go to one peer: the limit is kept all the more.
        max_copies = max_peers if plan.world - 1 > max_peers else sys.maxsize
        self._in = _Load(plan.world, plan.area_bytes, max_copies)
        self._out = _Load(plan.world, plan.area_bytes, max_copies)
        self._local_area = local_area
        self._local = self._in if local_area == "incoming" else self._out
        self._num_rounds = 0  # that both have places for
        self._rows = tuple(array("l") for _ in range(5))

    def rows(self) -> Rows:
        bundles, sources, ranks, rounds, relays = self._rows
        num_rounds = 1 + max(rounds, default=-1)
        return Rows(bundles, sources, ranks, rounds, relays, num_rounds, self._local_area)

    def add_local(self, bundle: int, rank: int, size: int) -> None:
        number = self._first([(self._local, rank, 1, 0)], size)
        self._local.take(rank, number, size)
        self._add(bundle, [rank], [rank], [number], 0)

    def add_pairs(self, bundle: int, pairs: Sequence[tuple[int, int]], size: int) -> None:
        """Most of all copies come here: written for speed."""
        left_in, left_out = self._in.left, self._out.left
        take_in, take_out = self._in.take, self._out.take
        open_in, open_out = self._in.open_rounds(size), self._out.open_rounds(size)
        numbers = []
        for source, rank in pairs:
            room_in, room_out = left_in[rank], left_out[source]
            open_rounds = open_in[rank] & open_out[source]
            while True:
                lowest = open_rounds & -open_rounds
                number = lowest.bit_length() - 1
                if number >= self._num_rounds:
                    self._grow(number)
                if room_in[number] < size:
                    open_in[rank] ^= lowest
                elif room_out[number] < size:
                    open_out[source] ^= lowest
                else:
                    break
                open_rounds ^= lowest
            take_in(rank, number, size)
            take_out(source, number, size)
            # as a rule the next copy is as large, and would only find that out
            if room_in[number] < size:
                open_in[rank] ^= lowest
            if room_out[number] < size:
                open_out[source] ^= lowest
            numbers.append(number)
        self._add(bundle, [pair[0] for pair in pairs], [pair[1] for pair in pairs], numbers, 0)

    def add_relayed(self, bundle: int, far: Far, size: int) -> None:
        """Both hops at once: the second one's round follows from the first one's."""
        ends = [
            (self._in, far.landing, 1, 0),
            (self._out, far.source, 1, 0),
            (self._out, far.landing, len(far.others), RELAY_ROUNDS),
            *((self._in, rank, 1, RELAY_ROUNDS) for rank in far.others),
        ]
        number = self._first(ends, size)
        self._in.take(far.landing, number, size)
        self._out.take(far.source, number, size)
        self._add(bundle, [far.source], [far.landing], [number], 0)
        number, copies = number + RELAY_ROUNDS, len(far.others)
        for rank in far.others:
            self._in.take(rank, number, size)
            self._out.take(far.landing, number, size)
        self._add(bundle, [far.landing] * copies, far.others, [number] * copies, 1)

    def _first(self, ends: Sequence[tuple[_Load, int, int, int]], size: int) -> int:
        """The first round with room at all ``ends``: load, rank, copies, how many rounds later."""
        open_rounds = -1
        for load, rank, copies, later in ends:
            open_rounds &= load.open_rounds(size, copies)[rank] >> later
        while True:
            lowest = open_rounds & -open_rounds
            number = lowest.bit_length() - 1
            if number + RELAY_ROUNDS >= self._num_rounds:
                self._grow(number + RELAY_ROUNDS)
            for load, rank, copies, later in ends:
                if not load.has_room(rank, number + later, size, copies):
                    load.open_rounds(size, copies)[rank] &= ~(lowest << later)
                    open_rounds &= ~lowest
                    break
            else:
                return number

    def _grow(self, number: int) -> None:
        """Places for round ``number``, and for some more."""
        self._num_rounds = number + 1 + GROWTH
        self._in.grow(self._num_rounds)
        self._out.grow(self._num_rounds)

    def _add(
        self,
        bundle: int,
        sources: Sequence[int],
        ranks: Sequence[int],
        numbers: Sequence[int],
        is_relay: int,
    ) -> None:
        values = [bundle] * len(ranks), sources, ranks, numbers, [is_relay] * len(ranks)
        for column, more in zip(self._rows, values, strict=True):
            column.extend(more)
