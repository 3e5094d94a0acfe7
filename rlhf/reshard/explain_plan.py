"""A plan's rows for all ranks, as ``explain`` adds them up."""

from __future__ import annotations

import time

import numpy as np

from rlhf.reshard.bounds import lower_bound_bytes, node_lower_bound_bytes, send_balance_bound
from rlhf.reshard.explain import Moves
from rlhf.reshard.plan import ReshardPlan, plan
from rlhf.reshard.rounds import MAX_PEERS, Rows, assign_rounds
from rlhf.reshard.schedule import share
from rlhf.reshard.topology import Topology
from rlhf.weights.spread import Spread


def plan_moves(
    spread: Spread,
    topology: Topology,
    *,
    itemsize: int,
    area_bytes: int,
    max_peers: int = MAX_PEERS,
) -> Moves:
    """What all ranks move, planned as one rank plans it, and the seconds that took.

    Args:
        itemsize, area_bytes, max_peers: as in :func:`rlhf.reshard.schedule.rank_plan`.
    """
    begun = time.perf_counter()
    made = plan(spread, topology, itemsize, area_bytes)
    rows = assign_rounds(made, max_peers)
    share(made, rows, 0)
    return moves_of(made, rows, time.perf_counter() - begun)


def moves_of(made: ReshardPlan, rows: Rows, build_s: float) -> Moves:
    """What all ranks move by a plan that took ``build_s`` seconds."""
    source, destination, number = (
        np.asarray(values, np.int64) for values in (rows.source, rows.destination, rows.round)
    )
    bundles = [sending.bundle for sending in made.sendings]
    which = np.asarray(rows.bundle, np.int64)
    areas = np.array([bundle.area_bytes for bundle in bundles], np.int64)[which]
    return Moves(
        world=made.world,
        source=source,
        destination=destination,
        num_bytes=np.array([bundle.num_bytes for bundle in bundles], np.int64)[which],
        round=number,
        lower_bound_bytes=lower_bound_bytes(made),
        cross_node_lower_bound_bytes=node_lower_bound_bytes(made),
        send_balance_bound=send_balance_bound(made),
        staging_bytes=_staging_bytes(made.world, source, destination, number, areas),
        plan_build_s=build_s,
    )


def _staging_bytes(
    world: int, source: np.ndarray, destination: np.ndarray, number: np.ndarray, areas: np.ndarray
) -> int:
    """Two areas each way, as large as the rank's largest round, on the rank that has most."""
    if not len(number):
        return 0
    num_rounds = int(number.max()) + 1

    def largest(rank: np.ndarray, size: np.ndarray) -> np.ndarray:
        used = np.bincount(rank * num_rounds + number, size, world * num_rounds)
        return used.reshape(world, num_rounds).max(1)

    leaving = np.where(source == destination, 0, areas)
    return int(2 * (largest(destination, areas) + largest(source, leaving)).max())
