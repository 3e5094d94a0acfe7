"""Seconds of collectives between ranks of a group: what travels inside nodes and between them."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.planner.speeds import Speeds

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Group:
    """``size`` ranks, each ``stride`` behind the one before; nodes have ``gpus_per_node`` ranks."""

    size: int
    stride: int
    gpus_per_node: int

    @property
    def per_node(self) -> int:
        """Ranks of the group on one node."""
        if self.size * self.stride <= self.gpus_per_node:
            return self.size
        return max(1, min(self.size, self.gpus_per_node // self.stride))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def gather_s(group: Group, num_bytes: float, speeds: Speeds) -> float:
    """Each rank ends with all ``num_bytes``, of which it had its share; the same seconds are those
    of a reduction that leaves each rank its share.

    ``(1 - 1/size) * bytes`` over the link in a node; between nodes ``(1 - 1/nodes) * bytes``, which
    the group's ranks of a node take in together. The slower of both decides.
    """
    if group.size == 1:
        return 0.0
    inside = (1 - 1 / group.per_node) * num_bytes / (speeds.nvlink_gbs * GIGA)
    across = (1 - 1 / group.nodes) * num_bytes / (speeds.nic_gbs * GIGA * group.per_node)
    return max(inside, across) / speeds.collective + latency_s(group, speeds)


def reduce_s(group: Group, num_bytes: float, speeds: Speeds) -> float:
    """Each rank ends with the sum of ``num_bytes``: a reduction to shares and a gather."""
    return 2 * gather_s(group, num_bytes, speeds)


def exchange_s(group: Group, num_bytes: float, speeds: Speeds) -> float:
    """Each rank sends ``num_bytes`` in equal parts to all ranks of the group, itself too."""
    if group.size == 1:
        return 0.0
    inside = (group.per_node - 1) / group.size * num_bytes / (speeds.nvlink_gbs * GIGA)
    across = (1 - group.per_node / group.size) * num_bytes / (speeds.nic_gbs * GIGA)
    return max(inside, across) / speeds.collective + latency_s(group, speeds)


def send_s(group: Group, num_bytes: float, speeds: Speeds) -> float:
    """From one rank of the group to the next."""
    if group.size == 1:
        return 0.0
    speed = speeds.nvlink_gbs if group.nodes == 1 else speeds.nic_gbs
    return num_bytes / (speed * GIGA * speeds.collective) + latency_s(group, speeds)


def latency_s(group: Group, speeds: Speeds) -> float:
    """Of a collective without bytes."""
    if group.size == 1:
        return 0.0
    return speeds.collective_s if group.nodes == 1 else speeds.network_collective_s
