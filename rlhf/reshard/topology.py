"""Which node each rank runs on, and which place it has there. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """``nodes[rank]`` is the number of its node."""

    nodes: tuple[int, ...]

    @classmethod
    def of(cls, world: int, ranks_per_node: int) -> Topology:
        """Nodes filled in rank order."""
        return cls(tuple(rank // ranks_per_node for rank in range(world)))

    @cached_property
    def rails(self) -> Sequence[int]:
        """By rank: how many ranks of its node come before it. Equal numbers share a switch."""
        seen: dict[int, int] = {}
        out = []
        for node in self.nodes:
            out.append(seen.get(node, 0))
            seen[node] = out[-1] + 1
        return out
