"""What a reshard costs, and how far that is from the least possible. Pure numpy.

GB are 1e9 bytes. Four link classes: a rank's copy from itself (``self``), ranks of one node
(``node``), ranks of equal place in two nodes, whose NICs share a switch (``rail``), other ranks
(``fabric``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

GIGA = 1e9
MESSAGE_S = 20e-6
"""Latency that a rank pays for each message of a round, one after the other."""


class Link(IntEnum):
    """How two ranks are joined."""

    SELF = 0
    NODE = 1
    RAIL = 2
    FABRIC = 3


@dataclass(frozen=True)
class Moves:
    """All that a plan moves, between all ranks. A row is bytes of one round between two ranks.

    Several rows may be of one message: what goes from one rank to another in a round is one.
    """

    world: int
    source: NDArray[np.int64]  # [N] ranks; source == destination: a copy on the rank itself
    destination: NDArray[np.int64]  # [N]
    num_bytes: NDArray[np.int64]  # [N]
    round: NDArray[np.int64]  # [N] from 0
    lower_bound_bytes: int  # needed and not held, over ranks
    cross_node_lower_bound_bytes: int  # needed by a node and held by none of its ranks, over nodes
    send_balance_bound: float  # least max / mean bytes sent of any choice of sources
    staging_bytes: int  # largest of all ranks
    plan_build_s: float  # per rank


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes of the two layouts, in bytes."""

    model_bytes: int
    train_shard_bytes_mean: float


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Of one rank, each way, in GB/s; a link carries both directions at once."""

    nic_gbs: float = 45.0
    nvlink_gbs: float = 400.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: must be above 0 GB/s and finite, is {value}")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Bytes, counts and seconds of one reshard; names are those of ``rlhf explain --json``."""

    ranks: int
    nodes: int
    ranks_per_node: int  # of the largest node
    model_bytes: int
    train_shard_bytes_mean: float
    rollout_shard_bytes_mean: float
    moved_bytes_total: int
    moved_bytes_per_rank_mean: float
    moved_bytes_per_rank_max: int
    lower_bound_bytes: int
    cross_node_bytes_total: int
    cross_node_lower_bound_bytes: int
    full_gather_bytes_per_rank: float
    local_bytes_total: int
    bytes_by_link: dict[str, int]
    messages: int
    rounds: int
    staging_bytes: int
    send_balance: float
    send_balance_bound: float
    predicted_s: float
    floor_s: float
    full_gather_floor_s: float
    full_gather_node_floor_s: float
    plan_build_s_per_rank: float
    nic_gbs: float
    nvlink_gbs: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def explain(
    moves: Moves, nodes: Sequence[int], weights: Weights, speeds: LinkSpeeds
) -> Explanation:
    """Add up ``moves``.

    Args:
        nodes: of each rank.
    """
    links = links_of(moves, nodes)
    by_link = sums(links, moves.num_bytes, len(Link)).astype(np.int64)
    remote = links != Link.SELF
    received = sums(moves.destination[remote], moves.num_bytes[remote], moves.world)
    sent = sums(moves.source[remote], moves.num_bytes[remote], moves.world)
    moved, crossing = int(by_link[1:].sum()), int(by_link[2:].sum())
    full_gather = weights.model_bytes - weights.train_shard_bytes_mean
    per_node, several_nodes = int(max(np.bincount(nodes))), len(set(nodes)) > 1
    nic, nvlink = speeds.nic_gbs * GIGA, speeds.nvlink_gbs * GIGA
    load = link_seconds(moves, links, speeds)
    return Explanation(
        ranks=moves.world,
        nodes=len(set(nodes)),
        ranks_per_node=per_node,
        model_bytes=weights.model_bytes,
        train_shard_bytes_mean=weights.train_shard_bytes_mean,
        rollout_shard_bytes_mean=int(moves.num_bytes.sum()) / moves.world,
        moved_bytes_total=moved,
        moved_bytes_per_rank_mean=moved / moves.world,
        moved_bytes_per_rank_max=int(received.max()),
        lower_bound_bytes=moves.lower_bound_bytes,
        cross_node_bytes_total=crossing,
        cross_node_lower_bound_bytes=moves.cross_node_lower_bound_bytes,
        full_gather_bytes_per_rank=full_gather,
        local_bytes_total=int(by_link[Link.SELF]),
        bytes_by_link={link.name.lower(): int(by_link[link]) for link in Link},
        messages=_message_keys(moves, remote).size,
        rounds=num_rounds(moves),
        staging_bytes=moves.staging_bytes,
        send_balance=float(sent.max() / sent.mean()) if moved else 1.0,
        send_balance_bound=moves.send_balance_bound,
        predicted_s=_predicted_s(moves, remote, load),
        floor_s=float(load.sum(axis=1).max(initial=0.0)),
        full_gather_floor_s=full_gather / (nic if several_nodes else nvlink),
        full_gather_node_floor_s=max(
            full_gather / per_node / nic if several_nodes else 0.0, full_gather / nvlink
        ),
        plan_build_s_per_rank=moves.plan_build_s,
        nic_gbs=speeds.nic_gbs,
        nvlink_gbs=speeds.nvlink_gbs,
    )


def links_of(moves: Moves, nodes: Sequence[int]) -> NDArray[np.int64]:
    """[N] link class of each row."""
    node, place = np.asarray(nodes), np.asarray(_places(nodes))
    source, destination = moves.source, moves.destination
    return np.select(
        [
            source == destination,
            node[source] == node[destination],
            place[source] == place[destination],
        ],
        [Link.SELF, Link.NODE, Link.RAIL],
        Link.FABRIC,
    )


def link_seconds(moves: Moves, links: NDArray[np.int64], speeds: LinkSpeeds) -> NDArray[np.float64]:
    """[4, rounds, world] seconds that a rank's NIC out, NIC in, NVLink out, NVLink in are busy."""
    out = []
    for inside, speed in ((False, speeds.nic_gbs), (True, speeds.nvlink_gbs)):
        rows = links == Link.NODE if inside else links >= Link.RAIL
        out += [
            bytes_per_round(moves, ranks, rows) / (speed * GIGA)
            for ranks in (moves.source, moves.destination)
        ]
    return np.stack(out)


def bytes_per_round(
    moves: Moves, ranks: NDArray[np.int64], rows: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """[rounds, world] bytes of ``rows``, counted at ``ranks`` (sources or destinations)."""
    shape = num_rounds(moves), moves.world
    keys = moves.round[rows] * moves.world + ranks[rows]
    return sums(keys, moves.num_bytes[rows], shape[0] * shape[1]).reshape(shape)


def num_rounds(moves: Moves) -> int:
    return int(moves.round.max(initial=-1)) + 1


def _predicted_s(moves: Moves, remote: NDArray[np.bool_], load: NDArray[np.float64]) -> float:
    """Rounds in sequence, each as long as its slowest rank takes."""
    rounds, world = load.shape[1:]
    keys = _message_keys(moves, remote)
    number, source, destination = keys // world**2, keys // world % world, keys % world
    messages = [
        np.bincount(number * world + ranks, minlength=rounds * world).reshape(rounds, world)
        for ranks in (source, destination)
    ]
    seconds = load.max(axis=0) + MESSAGE_S * np.maximum(*messages)
    return float(seconds.max(axis=1).sum())


def _message_keys(moves: Moves, remote: NDArray[np.bool_]) -> NDArray[np.int64]:
    """One number per (round, source, destination) that has bytes."""
    keys = (moves.round * moves.world + moves.source) * moves.world + moves.destination
    return np.unique(keys[remote])


def sums(keys: NDArray[np.int64], num_bytes: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """[size] bytes by key; exact below 2**53."""
    return np.bincount(keys, num_bytes, size).astype(np.float64)


def _places(nodes: Sequence[int]) -> list[int]:
    """By rank: how many ranks of its node come before it."""
    seen: dict[int, int] = {}
    out = []
    for node in nodes:
        out.append(seen.get(node, 0))
        seen[node] = out[-1] + 1
    return out
