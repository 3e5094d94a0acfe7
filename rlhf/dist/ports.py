"""All ports that a job listens on, planned from its number: nothing is searched, nothing is drawn.

Two engines that look for a free port at the same moment find the same one; a planned port is each
engine's own. The range lies below the one from which the kernel takes ports for connections
(32768 and up on Linux).
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PORT = 10_000
LAST_PORT = 29_999
ENGINE_PORTS = 16
"""Of an engine: see ``rlhf.rollout.sglang_engine``."""
NODE_PORTS = 8
"""Of each node beside its engines': the ranks' store, the preflight's, and some in reserve."""


@dataclass(frozen=True, slots=True)
class PortPlan:
    """Ports of one node of a job."""

    base: int
    engines: int
    ports_per_engine: int
    dp_size: int

    @property
    def store(self) -> int:
        """Where the ranks' store listens, on the first node."""
        return self.base

    @property
    def preflight(self) -> int:
        """Where the preflight's store listens, on the first node."""
        return self.base + 1

    @property
    def probe(self) -> int:
        """Where each node's preflight lets the others try to reach it."""
        return self.base + 2

    def engine(self, number: int, dp_rank: int = 0) -> range:
        """Ports of one engine of the node, or of one of its data-parallel ranks.

        Raises:
            ValueError: there is no such engine or rank.
        """
        if not (0 <= number < self.engines and 0 <= dp_rank < self.dp_size):
            raise ValueError(
                f"engine {number}, dp rank {dp_rank}: the plan has {self.engines} engines of "
                f"{self.dp_size} dp ranks on a node"
            )
        start = self.base + NODE_PORTS
        start += (number * self.dp_size + dp_rank) * self.ports_per_engine
        return range(start, start + self.ports_per_engine)

    def all_ports(self) -> list[int]:
        """Every port of the node, in order."""
        return list(range(self.base, self.base + _block(self)))


def plan_ports(
    job: int,
    node: int,
    num_nodes: int,
    engines: int,
    ports_per_engine: int,
    dp_size: int = 1,
) -> PortPlan:
    """Ports of node ``node`` of job ``job``: one block of the range per node.

    Blocks of a job's nodes differ as long as the range has that many, so nodes that share a network
    (containers, tests on one machine) do not meet; so do those of jobs with neighbouring numbers.

    Args:
        job: number of the job, any non-negative integer.
        engines: engines on a node.
        ports_per_engine: ports of each of its ``dp_size`` data-parallel ranks.

    Raises:
        ValueError: a number is out of range, or one node needs more ports than there are.
    """
    if job < 0 or not 0 <= node < num_nodes or min(engines, ports_per_engine) < 0 or dp_size < 1:
        raise ValueError(
            f"job {job}, node {node} of {num_nodes}, {engines} engines x {ports_per_engine} ports "
            f"x {dp_size} dp ranks: no such plan of ports"
        )
    plan = PortPlan(FIRST_PORT, engines, ports_per_engine, dp_size)
    size, room = _block(plan), LAST_PORT - FIRST_PORT + 1
    if size > room:
        raise ValueError(
            f"{engines} engines x {ports_per_engine} ports x {dp_size} dp ranks on a node need "
            f"{size} ports; {FIRST_PORT} to {LAST_PORT} has {room}"
        )
    block = (job * num_nodes + node) % (room // size)
    return PortPlan(FIRST_PORT + block * size, engines, ports_per_engine, dp_size)


def _block(plan: PortPlan) -> int:
    return NODE_PORTS + plan.engines * plan.ports_per_engine * plan.dp_size
