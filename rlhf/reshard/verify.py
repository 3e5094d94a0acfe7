"""What was sent against what was written: checksums of all transfers of one movement.

The rank sums every transfer's bytes as it packs them; after the last round each pair of ranks
exchanges the sums of all that went between them in one message, and what a rank passed on is summed
by whoever packed it first: those sums follow in a second message. The engine's receiver sums what
its parameters hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from rlhf.reshard.checksum import Checksum
from rlhf.reshard.pack import part_view
from rlhf.reshard.polling import Poll
from rlhf.reshard.rounds import RELAY_ROUNDS
from rlhf.reshard.schedule import Placed, RankPlan
from rlhf.reshard.transport import Transport

SHOWN = 4
"""Faults that are named; the others are counted."""


class Verifier:
    """One rank's sums of one movement."""

    def __init__(self, plan: RankPlan, device: torch.device, dtype: torch.dtype) -> None:
        """``dtype``: of transfers that have none of their own."""
        self._dtype = dtype
        self._plan = plan
        self._device = device
        self._checksum = Checksum(device)
        self._arriving = list(_numbered_arriving(plan))
        self._outgoing = list(_numbered_outgoing(plan))
        self._first_out = _firsts([sum(len(m.parts) for m in r.outgoing) for r in plan.rounds])
        self._first_in = _firsts([sum(1 for _ in r.arriving) for r in plan.rounds])
        self._due = torch.zeros(len(self._arriving), dtype=torch.int64, device=device)
        self._sent = torch.zeros(len(self._outgoing), dtype=torch.int64, device=device)
        self._extremes: list[tuple[int, Placed, Tensor, Tensor]] = []
        self._sums = False
        self._relays = self._find_relays()
        self._ways = {
            is_relay: (
                self._by_peer(self._outgoing, is_relay),
                self._by_peer(self._arriving, is_relay),
            )
            for is_relay in (False, True)
        }

    def begin(self, *, sums: bool) -> None:
        """Forget the movement before. Without ``sums`` only what is not finite is looked for."""
        self._extremes, self._sums = [], sums

    def sum_outgoing(self, number: int, area: Tensor) -> None:
        """A round's outgoing transfers lie packed in ``area``."""
        parts = [p for message in self._plan.rounds[number].outgoing for p in message.parts]
        for i, placed in enumerate(parts, self._first_out[number]):
            if not placed.is_relay:
                self._look(number, placed, area, self._sent[i])

    def sum_local(self, number: int, area: Tensor) -> None:
        """A round's local transfers lie packed in ``area``, the incoming one."""
        round_ = self._plan.rounds[number]
        first = self._first_in[number] + sum(len(m.parts) for m in round_.incoming)
        for i, placed in enumerate(round_.local, first):
            self._look(number, placed, area, self._due[i])

    def exchange(self, transport: Transport, limit_s: float, poll: Poll) -> None:
        """Learn the sums of what came. Collective over the ranks of the plan, at most one message
        to each peer, twice.

        Raises:
            TransportError: a peer failed or is silent for ``limit_s``.
        """
        if not self._sums:
            return
        self._exchange(transport, limit_s, poll, is_relay=False)
        leaving, came = self._relays
        self._sent[leaving] = self._due[came]
        self._exchange(transport, limit_s, poll, is_relay=True)

    def faults(self, written: Tensor) -> tuple[str, ...]:
        """What is wrong, in words.

        Args:
            written: [arriving transfers] int64 in host memory, the receiver's sums.
        """
        differing = self._differing(written) if self._sums else []
        return tuple(_some(self._not_finite()) + _some(differing))

    def _exchange(
        self, transport: Transport, limit_s: float, poll: Poll, *, is_relay: bool
    ) -> None:
        out, come = self._ways[is_relay]
        buffers = {
            peer: torch.empty(len(places), dtype=torch.int64, device=self._device)
            for peer, places in come.items()
        }
        transport.start(
            [(self._sent[places].view(torch.uint8), peer) for peer, places in out.items()],
            [(buffer.view(torch.uint8), peer) for peer, buffer in buffers.items()],
        )
        transport.wait(limit_s, poll)
        for peer, places in come.items():
            self._due[places] = buffers[peer]

    def _find_relays(self) -> tuple[Tensor, Tensor]:
        """Where the rank passes on: index among what leaves, index among what came."""
        places = {(n, p.offset): i for i, (n, _, p) in enumerate(self._arriving)}
        pairs = [
            (i, places[number - RELAY_ROUNDS, placed.relayed_from])
            for i, (number, _, placed) in enumerate(self._outgoing)
            if placed.relayed_from is not None
        ]
        table = torch.tensor(pairs, dtype=torch.int64, device=self._device).view(-1, 2)
        return table[:, 0], table[:, 1]

    def _by_peer(
        self, numbered: list[tuple[int, int, Placed]], is_relay: bool
    ) -> dict[int, Tensor]:
        """Peer, ascending -> indices of its transfers; both ends have them in one order."""
        found: dict[int, list[int]] = defaultdict(list)
        for i, (_, peer, placed) in enumerate(numbered):
            if peer != self._plan.rank and placed.is_relay == is_relay:
                found[peer].append(i)
        return {peer: torch.tensor(found[peer], device=self._device) for peer in sorted(found)}

    def _look(self, number: int, placed: Placed, area: Tensor, total: Tensor) -> None:
        """Note the extremes of what lies packed; its checksum goes into ``total``.

        A NaN is the smallest and the largest of its rectangle, an infinity is one of them. What is
        packed as fp8 is checked by the packer: torch finds no largest of that.
        """
        view = part_view(area, placed, self._dtype)
        if view.numel() and view.dtype.itemsize > 1:
            least, most = torch.aminmax(view)
            self._extremes.append((number, placed, least, most))
        if self._sums:
            total.copy_(self._checksum.of(view))

    def _not_finite(self) -> list[str]:
        if not self._extremes:
            return []
        # of one dtype: float64 holds the largest of any, on a GPU too
        found = [extreme.double() for _, _, *both in self._extremes for extreme in both]
        bad = torch.stack(found).view(-1, 2).isfinite().all(1).logical_not()
        return [
            f"round {self._extremes[i][0]}: NaN or infinite elements leave in "
            f"{self._extremes[i][1].transfer}"
            for i in bad.nonzero().flatten().tolist()
        ]

    def _differing(self, written: Tensor) -> list[str]:
        different = (self._due.cpu() != written[: len(self._due)]).nonzero().flatten().tolist()
        return [
            f"round {self._arriving[i][0]}: the engine does not hold what was sent of "
            f"{self._arriving[i][2].transfer}"
            for i in different
        ]


def _numbered_arriving(plan: RankPlan) -> Iterator[tuple[int, int, Placed]]:
    """(round, peer, transfer) of all that arrives, in the order of the receiver's writes."""
    for number, round_ in enumerate(plan.rounds):
        for placed in round_.arriving:
            yield number, placed.transfer.source, placed


def _numbered_outgoing(plan: RankPlan) -> Iterator[tuple[int, int, Placed]]:
    for number, round_ in enumerate(plan.rounds):
        for message in round_.outgoing:
            for placed in message.parts:
                yield number, message.peer, placed


def _firsts(counts: list[int]) -> list[int]:
    """How many there are before each round."""
    return [0, *accumulate(counts)][:-1]


def _some(faults: list[str]) -> list[str]:
    more = len(faults) - SHOWN
    return [*faults[:SHOWN], *([f"and {more} more of these"] if more > 0 else [])]
