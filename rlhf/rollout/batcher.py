"""Pack: all ranks decide the batch from the facts, then tokens travel once to who trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from rlhf.batching import BatchPlan, assemble, split_updates
from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import TrainLayout
from rlhf.packing import Budget, Schedule, SequenceCost, schedule_microbatches
from rlhf.types import Batch, Phase, Rollout, Trajectory, TrajectoryFacts

BYTES_PER_TOKEN = 4 + 1 + 4 + 4


class CreditRule(Protocol):
    """What the batcher needs of the algorithm."""

    def credits(self, facts: Sequence[TrajectoryFacts]) -> Mapping[int, float]: ...

    def keep(self, facts: Sequence[TrajectoryFacts], credit: Mapping[int, float]) -> list[int]: ...

    def loss_weights(self, lengths: Mapping[int, int]) -> Mapping[int, float]: ...


def plan_batch(
    facts: Sequence[TrajectoryFacts],
    rule: CreditRule,
    num_updates: int,
    dp: int,
    budget: Budget,
    cost: SequenceCost,
) -> BatchPlan:
    """The step's decision from facts alone: what is trained, by whom, in which micro-batch. Pure.

    Denominators of the loss are those of a whole update over all DP ranks, so no cut into
    micro-batches or ranks changes the gradient; nor does leaving out trajectories that have none.
    An update that has no trajectory left is left out.
    """
    by_index = {f.index: f for f in facts}
    credit = rule.credits(facts)
    kept = set(rule.keep(facts, credit))
    trainable = [f.index for f in facts if f.num_trained_tokens]
    updates: list[Schedule] = []
    loss_weight: dict[int, float] = {}
    for indices in split_updates(trainable, num_updates):
        loss_weight.update(rule.loss_weights({i: by_index[i].num_trained_tokens for i in indices}))
        chosen = [i for i in indices if i in kept]
        if not chosen:
            continue
        local = schedule_microbatches(
            [by_index[i].num_tokens for i in chosen],
            dp,
            budget,
            cost,
            [by_index[i].group for i in chosen],
        )
        updates.append([[[chosen[k] for k in micro] for micro in micros] for micros in local])
    return BatchPlan(tuple(updates), loss_weight, credit)


class Batcher:
    """Holds what does not change over the run; :meth:`pack` is called once a step."""

    def __init__(
        self,
        *,
        rule: CreditRule,
        layout: TrainLayout,
        group: PhaseGroup,
        gate: PhaseGate,
        budget: Budget,
        cost: SequenceCost,
        num_updates: int,
        device: torch.device,
    ) -> None:
        self._rule = rule
        self._layout = layout
        self._group = group
        self._gate = gate
        self._budget = budget
        self._cost = cost
        self._num_updates = num_updates
        self._device = device

    def pack(self, rollout: Rollout, step: int) -> Batch:
        """This DP replica's batch. Collective over all ranks (one exchange of bytes)."""
        with self._gate.phase(Phase.PACK, step):
            plan = plan_batch(
                rollout.facts,
                self._rule,
                self._num_updates,
                self._layout.dp,
                self._budget,
                self._cost,
            )
            return self._assemble(rollout, plan)

    def pack_all(self, rollout: Rollout) -> Batch:
        """Every trajectory, once and without credit, for a role that only looks at it.

        Within the phase of that role. Collective over all ranks (one exchange of bytes).
        """
        facts = rollout.facts
        local = schedule_microbatches(
            [f.num_tokens for f in facts],
            self._layout.dp,
            self._budget,
            self._cost,
            [f.group for f in facts],
        )
        schedule = [[[facts[k].index for k in micro] for micro in micros] for micros in local]
        nothing = dict.fromkeys((f.index for f in facts), 0.0)
        return self._assemble(rollout, BatchPlan((schedule,), nothing, nothing))

    def _assemble(self, rollout: Rollout, plan: BatchPlan) -> Batch:
        dp_rank = self._layout.coord(self._group.world.rank).dp
        mine = self._exchange(rollout, plan)
        return assemble(plan, dp_rank, mine, self._budget, self._device)

    def _exchange(self, rollout: Rollout, plan: BatchPlan) -> dict[int, Trajectory]:
        me, size = self._group.world.rank, self._group.world.size
        dp_of = plan.owners(self._layout.dp)
        by_index = {f.index: f for f in rollout.facts}
        replica = [self._layout.coord(r).dp for r in range(size)]
        ordered = sorted(dp_of)
        send = [
            b"".join(
                _to_bytes(rollout.trajectories[i])
                for i in ordered
                if by_index[i].owner == me and dp_of[i] == replica[r]
            )
            for r in range(size)
        ]
        wanted = {
            r: [i for i in ordered if by_index[i].owner == r and dp_of[i] == replica[me]]
            for r in range(size)
        }
        sizes = [
            sum(by_index[i].num_tokens * BYTES_PER_TOKEN for i in wanted[r]) for r in range(size)
        ]
        received = self._group.exchange(send, sizes)
        out: dict[int, Trajectory] = {}
        for r in range(size):
            at = 0
            for i in wanted[r]:
                end = at + by_index[i].num_tokens * BYTES_PER_TOKEN
                out[i] = _from_bytes(received[r][at:end], by_index[i])
                at = end
        return out


def _to_bytes(t: Trajectory) -> bytes:
    return (
        t.tokens.astype(np.int32).tobytes()
        + t.rollout_logprobs.astype(np.float32).tobytes()
        + t.versions.astype(np.int32).tobytes()
        + t.loss_mask.astype(np.uint8).tobytes()
    )


def _from_bytes(raw: bytes, facts: TrajectoryFacts) -> Trajectory:
    n = facts.num_tokens
    return Trajectory(
        prompt_uid="",
        sample=facts.index,
        tokens=np.frombuffer(raw, np.int32, n, 0),
        rollout_logprobs=np.frombuffer(raw, np.float32, n, 4 * n),
        versions=np.frombuffer(raw, np.int32, n, 8 * n),
        loss_mask=np.frombuffer(raw, np.uint8, n, 12 * n).astype(bool),
        status=facts.status,
    )
