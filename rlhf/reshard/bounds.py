"""What no plan can do better, beside which a plan's own figures stand. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rlhf.reshard.balance import Senders, least_max_sent
from rlhf.reshard.plan import ReshardPlan


def lower_bound_bytes(plan: ReshardPlan) -> int:
    """What ranks need and do not hold, in the destination's dtype."""
    return sum(s.bundle.num_bytes * s.bundle.flow.num_moved for s in plan.sendings)


def node_lower_bound_bytes(plan: ReshardPlan) -> int:
    """What nodes need and none of their ranks holds, once for each node."""
    return sum(s.bundle.num_bytes * len(s.bundle.flow.far) for s in plan.sendings)


def sent_bytes(plan: ReshardPlan) -> list[int]:
    """What each rank sends to others."""
    sent = [0] * plan.world
    for sending in plan.sendings:
        size = sending.bundle.num_bytes
        for source, _ in sending.near:
            sent[source] += size
        for far in sending.far:
            sent[far.source] += size
            sent[far.landing] += size * len(far.others)
    return sent


def send_balance(sent: Sequence[int]) -> float:
    """Largest over mean; 1 where nothing is sent."""
    return max(sent) * len(sent) / sum(sent) if any(sent) else 1.0


def send_balance_bound(plan: ReshardPlan) -> float:
    """The least balance of sent bytes under any choice of sources.

    A copy may come from any holder on the node, else from any holder; on a node without one any
    needer may pass it on.
    """
    shared: dict[Senders, int] = defaultdict(int)
    for sending in plan.sendings:
        flow, size = sending.bundle.flow, sending.bundle.num_bytes
        for _, holders in flow.near:
            shared[holders] += size
        for needers in flow.far:
            shared[flow.holders] += size
            if len(needers) > 1:
                shared[needers] += size * (len(needers) - 1)
    total = sum(shared.values())
    return max(1.0, least_max_sent(shared, plan.world) * plan.world / total) if total else 1.0
