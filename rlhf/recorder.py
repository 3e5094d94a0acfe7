"""What a step was like: facts of all ranks become one set of metrics, written once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from rlhf.algorithms.algorithm import update_metrics
from rlhf.algorithms.gap import NUM_BINS, gap_metrics, gap_sums
from rlhf.algorithms.values import NUM_VALUE_SUMS, critic_metrics, value_metrics, value_sums
from rlhf.dist.clock import Account, Cause
from rlhf.dist.replicas import Replicas
from rlhf.evaluate import SOLVED, Accuracy
from rlhf.ground import Ground
from rlhf.mcore.forward import TrainStats
from rlhf.memory.ledger import Ledger, ledger_metrics, ledger_text
from rlhf.reshard.execute import MoveStats
from rlhf.rollout.collect import sum_of
from rlhf.rollout.score_probe import ProbeGap
from rlhf.track import report
from rlhf.track.accounts import Accounts
from rlhf.track.metrics import Max, Mean, Metric, Sum, merge, values
from rlhf.track.tracker import Tracker
from rlhf.types import Batch, Phase, Rollout, Status, TrajectoryFacts

GAP_SUMS = 3 + NUM_BINS


class Recorder:
    """Gathers, merges and hands to the tracker. Every rank calls every method."""

    def __init__(self, ground: Ground, tracker: Tracker) -> None:
        self._ground = ground
        self._tracker = tracker
        self._replicas = Replicas(ground.plan.train, ground.group)
        self._updates: list[Mapping[str, Metric]] = []
        self._trained_loads: list[np.ndarray] = []  # of this step's updates
        self._reshards: list[Mapping[str, Metric]] = []  # of this rank
        self._moved: Mapping[str, Metric] = {}  # bytes of its last reshard; all are alike
        self._seconds: dict[str, float] = {}
        self._ledger: Ledger | None = None
        self._told_memory = False
        self._began = time.perf_counter()
        self.accuracies: list[Accuracy] = []

    @classmethod
    def create(cls, ground: Ground, *, record: bool) -> Recorder:
        """With the tracker of this rank: one that writes on the first rank, if it shall record."""
        config = ground.plan.config
        tracker = Tracker(
            Path(config.run_dir),
            config.track,
            config.num_steps,
            is_writer=record and ground.plan.world.is_first,
            config=config.model_dump(mode="json"),
        )
        ground.closers.append(tracker.close)
        return cls(ground, tracker)

    def watch_memory(self, ledger: Ledger) -> None:
        """Log what it measures, with each step; the first step's also as a table."""
        self._ledger = ledger

    def start(self, first_step: int) -> None:
        """Drop what an interrupted run wrote beyond its checkpoint; start the clock."""
        self._tracker.start(first_step)
        self._ground.gate.take_seconds()
        self._ground.gate.clock.take()
        self._began = time.perf_counter()

    def add_update(self, stats: TrainStats) -> None:
        """Statistics of one optimizer step; equal on all ranks."""
        own: dict[str, Metric] = {
            "optim/grad_norm": Mean(stats.grad_norm),
            "optim/lr": Max(stats.lr),
            "optim/skipped": Sum(0.0 if stats.ok else 1.0),
        }
        self._updates.append({**own, **update_metrics(stats.sums)})
        if stats.expert_loads is not None:
            self._trained_loads.append(stats.expert_loads.numpy())

    def add_critic_update(self, stats: TrainStats) -> None:
        """The same of the critic."""
        own: dict[str, Metric] = {
            "critic/grad_norm": Mean(stats.grad_norm),
            "critic/lr": Max(stats.lr),
            "critic/skipped": Sum(0.0 if stats.ok else 1.0),
        }
        self._updates.append({**own, **critic_metrics(stats.sums)})

    def add_reshard(self, stats: MoveStats) -> None:
        """Of one movement of weights; a step's line has those since the one before."""
        self._reshards.append({"reshard/verify_s": Max(stats.verify_s)})
        self._moved = {
            "reshard/sent_bytes": Sum(stats.sent_bytes),
            "reshard/local_bytes": Sum(stats.local_bytes),
        }

    def add_probe(self, gap: ProbeGap) -> None:
        """Of the engine that this rank leads."""
        self._reshards.append(
            {
                "reshard/probe_gap": Mean(gap.mean, gap.num_tokens),
                "reshard/probe_gap_max": Max(gap.max),
                "reshard/probe_alarm": Max(float(gap.alarm)),
            }
        )

    def add_accuracy(self, result: Accuracy, rollout: Rollout) -> None:
        """A held-out result."""
        self.accuracies.append(result)
        metrics = {
            "eval/accuracy": result.value,
            "eval/reward": result.mean_score,
            "eval/items": float(result.num_items),
        }
        self.log_phase(result.step, Phase.EVAL, metrics)
        self._tracker.samples(f"eval-{result.step:06d}", rollout.samples)

    def log_phase(
        self, steps_done: int, phase: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """A line for a phase that is over and belongs to no step. Collective over all ranks.

        Its seconds hold its waits and switches, and are left out of the next step's.
        """
        self._take_seconds()
        spent = sum(self._seconds.pop(name, 0.0) for name in (phase, "wait", "switch"))
        self._began += spent
        seconds = {f"seconds/{phase}": max(self._ground.group.gather(spent))}
        self._tracker.log_between(steps_done, {**(metrics or {}), **seconds})

    def log(self, step: int, rollout: Rollout, batch: Batch) -> None:
        """One line for the step. Collective over all ranks."""
        self._take_seconds()
        seconds, self._seconds = self._seconds, {}
        elapsed, self._began = time.perf_counter() - self._began, time.perf_counter()
        counts = len(batch.tokens) if self._replicas.speaks else 0
        parts: list[Mapping[str, Metric]] = [
            {"batch/tokens": Sum(counts), "batch/microbatches": Max(len(batch.micro_bounds))},
            {f"seconds/{name}": Max(value) for name, value in seconds.items()},
            {"seconds/step": Max(elapsed)},
            self._memory(),
            {f"memory_gib/{k}": Max(v) for k, v in self._ground.gate.take_memory().items()},
            *self._reshards,
            self._moved,
        ]
        clock = self._ground.gate.clock
        account = clock.take()
        with clock.spend(Cause.PEERS):
            told = self._ground.group.gather((merge(parts), account))
        parts = [part for part, _ in told]
        accounts = all_accounts([account for _, account in told])
        facts = rollout_metrics(rollout.facts)
        of_batch = {**gap_metrics(self._gap(batch)), **value_metrics(self._values(batch))}
        experts = expert_metrics(rollout.expert_loads, sum_of(self._trained_loads))
        shared = merge([facts, experts, *self._updates, of_batch])
        self._updates, self._trained_loads, self._reshards = [], [], []
        metrics = values(merge([*parts, shared]))
        metrics |= rates(rollout.facts, metrics) | accounts.shares()
        self._tracker.log(step, metrics)
        self._tracker.account(step, accounts)
        every = self._ground.plan.config.track.samples_every
        if every and step % every == 0:
            self._tracker.samples(f"step-{step:06d}", rollout.samples)

    def finish(self, steps_done: int) -> None:
        """Close the sinks; on the first rank draw the curves and print the tables.

        Collective over all ranks: what they did after the last step is accounted for too.
        """
        told = self._ground.group.gather(self._ground.gate.clock.take())
        self._tracker.account(steps_done, all_accounts(told), is_last=True)
        self._tracker.close()
        if self._ground.plan.world.is_first:
            config = self._ground.plan.config
            report.finish(Path(config.run_dir), Console(quiet=not config.track.console))

    def _take_seconds(self) -> None:
        for name, seconds in self._ground.gate.take_seconds().items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _memory(self) -> dict[str, Metric]:
        """Of this rank, by phase."""
        if self._ledger is None:
            return {}
        entries = self._ledger.take()
        if not self._told_memory:
            self._told_memory = True
            self._tracker.text("memory.txt", ledger_text(entries))
        return ledger_metrics(entries, self._ledger.host_bytes)

    def _gap(self, batch: Batch) -> torch.Tensor:
        """Summed over the DP replicas. Collective over all ranks."""
        sums = torch.zeros(GAP_SUMS, dtype=torch.float64)
        if self._replicas.speaks and len(batch.tokens):
            assert batch.rollout_logprobs is not None
            assert batch.old_logprobs is not None
            mask = batch.mask
            sums = gap_sums(batch.rollout_logprobs[mask].cpu(), batch.old_logprobs[mask].cpu())
        return self._replicas.total(sums)

    def _values(self, batch: Batch) -> torch.Tensor:
        """Summed over the DP replicas; zeros without a critic. Collective over all ranks."""
        sums = torch.zeros(NUM_VALUE_SUMS, dtype=torch.float64)
        if batch.values is not None and batch.returns is not None:
            sums = value_sums(batch.values[batch.mask], batch.returns[batch.mask])
        return self._replicas.total(sums)


def rollout_metrics(facts: Sequence[TrajectoryFacts]) -> dict[str, Metric]:
    """Reward, lengths and endings of a step's trajectories; per domain where there are several."""
    groups: dict[int, list[float]] = {}
    for f in facts:
        groups.setdefault(f.group, []).append(f.score.value)
    mixed = [float(min(v) != max(v)) for v in groups.values()]
    parts: list[Mapping[str, Metric]] = [
        {"rollout/groups_with_signal": Mean(sum(mixed) / len(mixed), len(mixed))}
    ]
    domains = {f.domain for f in facts}
    for f in facts:
        answer = float(f.num_trained_tokens)
        one: dict[str, Metric] = {
            "reward/mean": Mean(f.score.value),
            "reward/solved": Mean(float(f.score.value >= SOLVED)),
            "rollout/answer_tokens": Mean(answer),
            # E[-log p] of what was sampled: all answers, also those that no update sees
            "rollout/entropy": Mean(-f.logprob_sum / max(answer, 1), answer),
            "rollout/answer_tokens_max": Max(answer),
            "rollout/prompt_tokens": Mean(float(f.num_tokens) - answer),
            "rollout/truncated": Mean(float(f.status is Status.LENGTH)),
        }
        one |= {f"reward/part/{name}": Mean(value) for name, value in f.score.parts.items()}
        if len(domains) > 1:
            one[f"reward/domain/{f.domain}"] = Mean(f.score.value)
        parts.append(one)
    return merge(parts)


def all_accounts(by_rank: Sequence[Account]) -> Accounts:
    """Of the ranks in order; causes that no rank had are left out."""
    return Accounts(
        wall_s=tuple(account.wall_s for account in by_rank),
        causes={
            str(cause): tuple(account.seconds.get(cause, 0.0) for account in by_rank)
            for cause in Cause
            if any(account.seconds.get(cause) for account in by_rank)
        },
    )


def expert_metrics(rollout: np.ndarray | None, trained: np.ndarray | None) -> dict[str, Metric]:
    """How evenly tokens took the experts, in the engines and in training, and how far the two are
    from each other; each [layers with experts, experts]."""
    out: dict[str, Metric] = {}
    shares = []
    for name, loads in (("rollout", rollout), ("train", trained)):
        if loads is None or not loads.sum():
            continue
        relative = loads / loads.mean(axis=1, keepdims=True)
        out[f"experts/{name}_max_over_mean"] = Max(float(relative.max()))
        out[f"experts/{name}_unused"] = Mean(float((loads == 0).mean()))
        shares.append(loads / loads.sum(axis=1, keepdims=True))
    if len(shares) == 2:
        # total variation: the share of tokens that would have to take another expert
        distance = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
        out["experts/distance"] = Mean(float(distance.mean()))
    return out


def rates(facts: Sequence[TrajectoryFacts], metrics: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of the phases that handle tokens."""
    answered = sum(f.num_trained_tokens for f in facts)
    out = {}
    for phase, tokens in (("rollout", answered), ("update_actor", metrics.get("batch/tokens", 0))):
        seconds = metrics.get(f"seconds/{phase}", 0.0)
        if seconds and tokens:
            out[f"tokens_per_s/{phase}"] = tokens / seconds
    return out
