"""A plan's transfers as the rows that explain adds up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf.reshard.explain import Moves
from rlhf.reshard.schedule import RankPlan
from tests.helpers.reshard_oracle import Costs


def moves_of(plans: Sequence[RankPlan], costs: Costs) -> Moves:
    """Rows of all ranks' shares of a schedule, each seen by its destination."""
    rows = [
        (placed.transfer.source, plan.rank, placed.num_bytes, number)
        for plan in plans
        for number, share in enumerate(plan.rounds)
        for placed in share.arriving
    ]
    source, destination, num_bytes, number = np.array(rows, np.int64).reshape(-1, 4).T
    return Moves(
        world=len(plans),
        source=source,
        destination=destination,
        num_bytes=num_bytes,
        round=number,
        lower_bound_bytes=costs.lower_bound,
        cross_node_lower_bound_bytes=costs.cross_node_lower_bound,
        send_balance_bound=1.0,
        staging_bytes=2 * max(p.incoming_area_bytes + p.outgoing_area_bytes for p in plans),
        plan_build_s=0.5,
    )
