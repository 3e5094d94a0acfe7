"""From trajectories on many ranks to packed micro-batches: decided alike on every rank.

Every rank knows the facts of all trajectories (lengths, scores) and computes the same schedule;
tokens then travel once, to the ranks that train them (``rollout.batcher``), which assemble their
:class:`~rlhf.types.Batch`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf.packing import Budget, Schedule
from rlhf.types import Batch, PackedSequence, Status, Trajectory


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The whole step's decision, equal on every rank.

    ``updates[k][dp][m]`` lists the trajectory indices of micro-batch m of update k on a DP rank;
    ``loss_weight[i]`` and ``credit[i]`` belong to trajectory i.
    """

    updates: tuple[Schedule, ...]
    loss_weight: Mapping[int, float]
    credit: Mapping[int, float]

    def owners(self, layout_dp: int) -> dict[int, int]:
        """Trajectory index -> DP rank that trains it."""
        return {
            i: dp
            for schedule in self.updates
            for dp in range(layout_dp)
            for micro in schedule[dp]
            for i in micro
        }


def split_updates(indices: Sequence[int], num_updates: int) -> list[list[int]]:
    """Trajectories in order, cut in at most ``num_updates`` non-empty runs of nearly equal size."""
    num = min(num_updates, len(indices))
    bounds = [round(k * len(indices) / num) for k in range(num + 1)] if num else [0]
    return [list(indices[a:b]) for a, b in itertools.pairwise(bounds)]


def assemble(
    plan: BatchPlan,
    dp_rank: int,
    trajectories: Mapping[int, Trajectory],
    budget: Budget,
    device: torch.device,
) -> Batch:
    """This DP rank's batch from its trajectories; no micro-batch when there is nothing to train."""
    micros = [micro for schedule in plan.updates for micro in schedule[dp_rank]]
    packed = [_assemble_micro(micro, trajectories, plan, budget) for micro in micros]
    ends = np.cumsum([0] + [len(p["tokens"]) for p, _ in packed]).tolist()
    counts = np.cumsum([0] + [len(schedule[dp_rank]) for schedule in plan.updates]).tolist()

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        whole = np.concatenate([p[name] for p, _ in packed] or [np.zeros(0)])
        return torch.from_numpy(whole).to(device=device, dtype=dtype)

    return Batch(
        tokens=column("tokens", torch.int64),
        positions=column("positions", torch.int64),
        mask=column("mask", torch.bool),
        micro_bounds=tuple(itertools.pairwise(ends)),
        mini_bounds=tuple(itertools.pairwise(counts)),
        sequences=tuple(sequences for _, sequences in packed),
    ).with_columns(
        rollout_logprobs=column("rollout_logprobs", torch.float32),
        credits=column("credits", torch.float32),
        loss_weights=column("loss_weights", torch.float32),
    )


def _assemble_micro(
    micro: Sequence[int], trajectories: Mapping[int, Trajectory], plan: BatchPlan, budget: Budget
) -> tuple[dict[str, np.ndarray], tuple[PackedSequence, ...]]:
    total = sum(budget.rounded(len(trajectories[i].tokens)) for i in micro) or budget.align
    out = {
        "tokens": np.zeros(total, np.int64),
        "positions": np.zeros(total, np.int64),
        "mask": np.zeros(total, bool),
        "rollout_logprobs": np.zeros(total, np.float32),
        "credits": np.zeros(total, np.float32),
        "loss_weights": np.zeros(total, np.float32),
    }
    out["positions"][:] = np.arange(total)  # of an empty micro-batch, which is all padding
    sequences, at = [], 0
    for i in micro:
        t = trajectories[i]
        here = slice(at, at + len(t.tokens))
        out["tokens"][here] = t.tokens
        padded = budget.rounded(len(t.tokens))
        out["positions"][at : at + padded] = np.arange(padded)
        out["mask"][here] = t.loss_mask
        out["rollout_logprobs"][here] = t.rollout_logprobs
        out["credits"][here] = plan.credit[i] * t.loss_mask
        out["loss_weights"][here] = plan.loss_weight[i] * t.loss_mask
        sequences.append(PackedSequence(i, at, len(t.tokens), truncated=t.status is Status.LENGTH))
        at += padded
    return out, tuple(sequences)
