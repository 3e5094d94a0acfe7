"""Nodes tell the first one what they have and whom they reach; it tells them the verdict.

Through a store on the first node, as the ranks will later: a node that cannot reach it says so.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from rlhf.cluster.facts import Gpu, NodeFacts
from rlhf.cluster.judge import Fault, Meeting

MEET_S = 40.0
"""From the first node's start until all have told their facts."""
REACH_S = 5.0
POLL_S = 0.05
Judge = Callable[[Sequence[NodeFacts], Meeting], list[Fault]]


@dataclass(frozen=True, slots=True)
class Place:
    """Who meets where. ``probes``: port of each node on which others try to reach it."""

    index: int
    hosts: tuple[str, ...]
    port: int
    probes: tuple[int, ...]


def confer(place: Place, facts: NodeFacts, judge: Judge) -> list[Fault]:
    """The verdict, equal on all nodes that reach the first.

    Raises:
        ConnectionError: this node does not reach the first one within MEET_S.
    """
    from torch.distributed import TCPStore

    first = place.hosts[0]
    try:
        store = TCPStore(
            first,
            place.port,
            is_master=place.index == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_S),
        )
    except RuntimeError as error:
        raise ConnectionError(f"{first}:{place.port}, the first node: {error}") from None
    with socket.create_server(("", place.probes[place.index]), backlog=len(place.hosts)):
        return _Table(store, place).confer(facts, judge)


@dataclass(frozen=True, slots=True)
class _Table:
    store: Any
    place: Place

    def confer(self, facts: NodeFacts, judge: Judge) -> list[Fault]:
        mine = self.place.index
        self.store.set(f"facts/{mine}", json.dumps(asdict(facts)))
        if mine == 0:
            deadline = time.monotonic() + MEET_S
            self.store.set("present", json.dumps(self._wait("facts", self._all(), deadline)))
        present: list[int] = json.loads(self.store.get("present"))
        self.store.set(f"clock/{mine}", str(time.time()))
        self.store.set(f"unreachable/{mine}", json.dumps(self._unreachable(present)))
        if mine == 0:
            verdict = self._verdict(present, judge)
            self.store.set("verdict", json.dumps([asdict(fault) for fault in verdict]))
        faults = [Fault(**fault) for fault in json.loads(self.store.get("verdict"))]
        self.store.set(f"read/{mine}", "1")
        if mine == 0:  # the store goes with this process
            self._wait("read", present, time.monotonic() + REACH_S)
        return faults

    def _all(self) -> list[int]:
        return list(range(len(self.place.hosts)))

    def _wait(self, what: str, nodes: Sequence[int], deadline: float) -> list[int]:
        """Those of ``nodes`` that have told by the deadline."""
        while True:
            told = [n for n in nodes if self.store.check([f"{what}/{n}"])]
            if len(told) == len(nodes) or time.monotonic() > deadline:
                return told
            time.sleep(POLL_S)

    def _unreachable(self, present: Sequence[int]) -> list[str]:
        others = [n for n in present if n != self.place.index]
        with ThreadPoolExecutor(max_workers=32) as pool:
            reached = pool.map(self._reaches, others)
        return [self.place.hosts[n] for n, ok in zip(others, reached, strict=True) if not ok]

    def _reaches(self, node: int) -> bool:
        with suppress(OSError):
            address = (self.place.hosts[node], self.place.probes[node])
            socket.create_connection(address, timeout=REACH_S).close()
            return True
        return False

    def _verdict(self, present: Sequence[int], judge: Judge) -> list[Fault]:
        told = self._wait("unreachable", present, time.monotonic() + MEET_S)
        hosts = self.place.hosts
        nodes = [_facts(self.store.get(f"facts/{n}")) for n in told]
        meeting = Meeting(
            clocks={hosts[n]: float(self.store.get(f"clock/{n}")) for n in told},
            unreachable={hosts[n]: json.loads(self.store.get(f"unreachable/{n}")) for n in told},
            absent=[hosts[n] for n in self._all() if n not in told],
        )
        return judge(nodes, meeting)


def _facts(text: bytes) -> NodeFacts:
    fields = json.loads(text)
    fields["gpus"] = tuple(Gpu(**gpu) for gpu in fields["gpus"])
    fields["ports_taken"] = tuple(fields["ports_taken"])
    return NodeFacts(**fields)
