"""The loop that ``rlhf tune`` runs on the ranks: the phases of a step, again and again, timed.

The weights do not change (the command sets a learning rate of next to nothing), so a rollout is of
the same prompts by the same policy however often it is repeated, and passes with micro-batches of
several sizes are over the same tokens. What is measured is gathered, so all ranks decide alike what
to measure next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.parts import build_batcher
from rlhf.rollout.batcher import Batcher
from rlhf.run import Run
from rlhf.tune.records import Pass, Round, SliceJob, write_rounds
from rlhf.tune.search import next_values, round_order
from rlhf.types import Rollout


def loop(run: Run) -> None:
    """Until the job's time or rounds are over. Collective over all ranks."""
    folder = Path(run.config.run_dir)
    job = SliceJob.read(folder)
    bench = _Bench(run, job.microbatch_tokens)
    run.resharder.run(version=0, step=0)
    rounds = [bench.measure(0, job.microbatch_tokens)]
    times: dict[float, list[float]] = {size: [] for size in job.microbatch_tokens}
    began = time.monotonic()
    for number in range(job.rounds):
        spent_ms = run.ground.group.max([int(1e3 * (time.monotonic() - began))])[0]
        if number >= 3 and spent_ms > 1e3 * job.seconds:
            break
        sizes: list[float] = []
        if job.microbatch_tokens:
            sizes = next_values(times, job.microbatch_tokens[0], number)
            sizes = round_order(sizes, number)
        rounds.append(bench.measure(number + 1, [int(size) for size in sizes]))
        for done in rounds[-1].passes:
            times[done.microbatch_tokens].append(sum(done.seconds.values()))
    if job.save:
        rounds[-1] = replace(rounds[-1], save_s=_save_s(run))
    if run.ground.plan.world.is_first:
        write_rounds(rounds, folder)


class _Bench:
    """The parts of a run, with a batcher for each size of micro-batches."""

    def __init__(self, run: Run, sizes: Sequence[int]) -> None:
        self._run = run
        self._batchers = {
            size: build_batcher(run.ground, run.algorithm, tokens=size) for size in sizes
        }

    def measure(self, step: int, sizes: Sequence[int]) -> Round:
        """Collective over all ranks."""
        run, batch = self._run, self._run.config.batch
        self._take()
        prompts = run.prompts.take(step, batch.prompts_per_step)
        rollout = run.collector.collect(prompts, step, run.sampling, batch.samples_per_prompt)
        rollout = run.reward_model.score(rollout, step)
        around = self._take()
        passes = [self._pass(self._batchers[size], size, rollout, step) for size in sizes]
        run.resharder.run(version=step + 1, step=step)
        for name, seconds in self._take().items():
            around[name] = around.get(name, 0.0) + seconds
        facts = rollout.facts
        lengths = [f.num_trained_tokens for f in facts]
        return Round(
            answers=len(facts),
            trained_answers=_num_trained(run, rollout),
            prompt_tokens=sum(f.num_tokens for f in facts) / len(facts) - _mean(lengths),
            answer_tokens=_mean(lengths),
            longest_answer_tokens=max(lengths),
            seconds=around,
            passes=passes,
        )

    def _pass(self, batcher: Batcher, size: int, rollout: Rollout, step: int) -> Pass:
        run = self._run
        batch = batcher.pack(rollout, step)
        batch = batch.with_columns(
            old_logprobs=run.actor.logprobs(batch, step),
            ref_logprobs=run.reference.logprobs(batch, step),
            **run.critic.values(batch, step),
        )
        batch = run.algorithm.assign_advantages(batch)
        for minibatch in batch.minibatches():
            run.critic.update(minibatch, step)
            run.actor.update(minibatch, step)
        return Pass(size, len(batch.micro_bounds), len(batch.tokens), self._take())

    def _take(self) -> dict[str, float]:
        """Seconds of the slowest rank by phase since the last call. Collective over all ranks."""
        told = self._run.ground.group.gather(self._run.ground.gate.take_seconds())
        names = dict.fromkeys(name for seconds in told for name in seconds)
        return {name: max(seconds.get(name, 0.0) for seconds in told) for name in names}


def _save_s(run: Run) -> float:
    """Of a checkpoint, which replaces the one that is there. Collective over all ranks."""
    began = time.perf_counter()
    run.checkpoints.save()
    return time.perf_counter() - began


def _num_trained(run: Run, rollout: Rollout) -> int:
    credit = run.algorithm.credits(rollout.facts)
    return len(run.algorithm.keep(rollout.facts, credit))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
