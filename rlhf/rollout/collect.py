"""Rollout: every engine answers its share of the prompts, and each answer is scored as it comes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhf.dist.clock import Cause
from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import RolloutLayout
from rlhf.rollout.engine import Completion, RolloutEngine, SampleRequest
from rlhf.rollout.routes import expert_loads
from rlhf.rollout.score_probe import ScoreProbe
from rlhf.types import (
    Phase,
    Prompt,
    Rollout,
    Sample,
    Score,
    Status,
    Trajectory,
    TrajectoryFacts,
)


class Scorer(Protocol):
    """What the collector needs of the rewards."""

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score: ...


class Decoder(Protocol):
    """What the collector needs of the tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled; the same for all prompts of a phase."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


def request_seed(run_seed: int, step: int, prompt_uid: str, occurrence: int, sample: int) -> int:
    """A 31-bit seed that depends on nothing but its arguments.

    ``occurrence`` counts the same prompt within a step: the tail of one epoch and the head of the
    next may meet there.
    """
    text = f"{run_seed}|{step}|{prompt_uid}|{occurrence}|{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & 0x7FFFFFFF


def count_occurrences(uids: Sequence[str]) -> list[int]:
    """How often each has come before."""
    seen: dict[str, int] = {}
    out = []
    for uid in uids:
        out.append(seen.get(uid, 0))
        seen[uid] = out[-1] + 1
    return out


def to_trajectory(prompt: Prompt, sample: int, done: Completion) -> Trajectory:
    """The prompt's and the engine's own token ids, never decoded and encoded again.

    Trained is what the engine generated, stop token included; nothing is derived from token values,
    so a padding id inside the text, or one equal to the stop token, changes nothing.
    """
    answer, asked = len(done.token_ids), len(prompt.token_ids)
    mask = response_mask(asked + answer, asked, answer)
    logprobs = np.zeros(asked + answer, np.float32)
    logprobs[asked:] = done.logprobs
    return Trajectory(
        prompt_uid=prompt.uid,
        sample=sample,
        tokens=np.array([*prompt.token_ids, *done.token_ids], np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=np.where(mask, done.version, -1).astype(np.int32),
        status=done.status,
        routes=done.routes,
    )


def response_mask(total: int, start: int, generated: int) -> np.ndarray:
    """[total] bool, True on ``generated`` positions from ``start``: only lengths decide."""
    at = np.arange(total)
    return (at >= start) & (at < start + generated)


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Of one share of a rollout."""

    decode_s: float = 0.0
    late_s: float = 0.0
    """From the engine's end to that of the last score."""


def sum_of(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Element-wise, of those that are there."""
    present = [a for a in arrays if a is not None]
    return np.sum(present, axis=0) if present else None


class Collector:
    """Asks the engine of this rank for its share; gathers facts, not tokens."""

    def __init__(
        self,
        *,
        engine: RolloutEngine | None,
        layout: RolloutLayout,
        group: PhaseGroup,
        gate: PhaseGate,
        scorer: Scorer,
        decoder: Decoder,
        seed: int,
        timeout_s: float,
        num_experts: int | None = None,
        probe: ScoreProbe | None = None,
    ) -> None:
        """``engine`` is None on ranks that do not lead one.

        ``num_experts``: routed experts of a layer, where engines record routes; else None.
        ``probe``: asked first in a rollout that is trained on.
        """
        self._engine = engine
        self._layout = layout
        self._group = group
        self._gate = gate
        self._scorer = scorer
        self._decoder = decoder
        self._seed = seed
        self._timeout_s = timeout_s
        self._num_experts = num_experts
        self._probe = probe
        self.version = -1

    def set_version(self, version: int) -> None:
        """The weight version that the engines hold from now on."""
        self.version = version

    def collect(
        self,
        prompts: Sequence[Prompt],
        step: int,
        sampling: Sampling,
        num_samples: int = 1,
        phase: Phase = Phase.ROLLOUT,
    ) -> Rollout:
        """``num_samples`` answers to each prompt. Collective over all ranks.

        The map from prompts to engines is fixed (prompt i to engine i mod engines) and so is the
        seed of each request: a rollout repeats whatever else is going on.
        """
        with self._gate.phase(phase, step):
            if self._probe is not None and phase is Phase.ROLLOUT:
                with self._gate.clock.spend(Cause.RESHARD_VERIFY):
                    self._probe.compare(step, self._timeout_s)
            began = time.perf_counter()
            with self._counted(Cause.DECODE, phase):
                mine, samples = self._answer(prompts, step, sampling, num_samples)
            late_s = self._engine.late_s if mine and self._engine is not None else 0.0
            spent = EngineTime(time.perf_counter() - began - late_s, late_s)
            loads = self._expert_loads([trajectory for _, trajectory in mine])
            began = time.perf_counter()
            with self._counted(Cause.TAIL_IDLE, phase):
                shares = self._group.gather(([facts for facts, _ in mine], loads, spent))
            if phase is Phase.ROLLOUT:
                waited_s = time.perf_counter() - began
                self._tell_apart(waited_s, [spent for _, _, spent in shares])
            facts = sorted((f for share, _, _ in shares for f in share), key=lambda f: f.index)
            want = len(prompts) * num_samples
            if [f.index for f in facts] != list(range(want)):
                raise RuntimeError(f"rollout gave {len(facts)} trajectories, expected {want}")
            return Rollout(
                facts=tuple(facts),
                trajectories={facts.index: trajectory for facts, trajectory in mine},
                samples=samples,
                expert_loads=sum_of([loads for _, loads, _ in shares]),
            )

    def _counted(self, cause: Cause, phase: Phase) -> AbstractContextManager[None]:
        """Of an evaluation all seconds have one cause."""
        return self._gate.clock.spend(cause) if phase is Phase.ROLLOUT else nullcontext()

    def _tell_apart(self, waited_s: float, spent: Sequence[EngineTime]) -> None:
        """What was decoding, what was waiting. A rank that leads no engine has only waited; its
        device generated for as long as the engine's leader says."""
        clock, layout, me = self._gate.clock, self._layout, self._group.world.rank
        leader = layout.leader(layout.coord(me).engine)
        if leader == me:
            clock.move(Cause.DECODE, Cause.REWARD_WAIT, spent[me].late_s)
            return
        decode_s = min(waited_s, spent[leader].decode_s)
        clock.move(Cause.TAIL_IDLE, Cause.DECODE, decode_s)
        late_s = min(waited_s - decode_s, spent[leader].late_s)
        clock.move(Cause.TAIL_IDLE, Cause.REWARD_WAIT, late_s)

    def _answer(
        self, prompts: Sequence[Prompt], step: int, sampling: Sampling, num_samples: int
    ) -> tuple[list[tuple[TrajectoryFacts, Trajectory]], tuple[Sample, ...]]:
        if self._engine is None:
            return [], ()
        me = self._layout.coord(self._group.world.rank).engine
        occurrences = count_occurrences([p.uid for p in prompts])
        share = [i for i in range(len(prompts)) if i % self._layout.num_engines == me]
        requests = [
            SampleRequest(
                key=i * num_samples + s,
                token_ids=prompts[i].token_ids,
                seed=request_seed(self._seed, step, prompts[i].uid, occurrences[i], s),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=sampling.stop_token_ids,
            )
            for i in share
            for s in range(num_samples)
        ]
        scored: dict[int, tuple[TrajectoryFacts, Trajectory, Sample]] = {}

        def take(done: Completion) -> None:
            prompt = prompts[done.key // num_samples]
            if done.version != self.version:
                raise RuntimeError(
                    f"the engine answered with weights of version {done.version}, the trainer's "
                    f"are {self.version}: a reshard is missing"
                )
            trajectory = to_trajectory(prompt, done.key % num_samples, done)
            text = self._text(done, sampling.stop_token_ids)
            score = self._scorer.score(prompt, text, trajectory)
            facts = self._facts(done.key, num_samples, prompt, trajectory, score)
            sample = Sample(prompt.text, text, prompt.answer, score.value)
            scored[done.key] = (facts, trajectory, sample)

        if requests:
            self._engine.generate(requests, take, self._timeout_s)
        ordered = [scored[r.key] for r in requests]
        return [(f, t) for f, t, _ in ordered], tuple(s for _, _, s in ordered)

    def _expert_loads(self, trajectories: Sequence[Trajectory]) -> np.ndarray | None:
        """Of this rank's trajectories."""
        if self._num_experts is None:
            return None
        routes = [t.routes for t in trajectories if t.routes is not None]
        return sum_of([expert_loads(r, self._num_experts) for r in routes])

    def _text(self, done: Completion, stop_token_ids: tuple[int, ...]) -> str:
        ids = list(done.token_ids)
        if done.status is Status.STOPPED and ids and ids[-1] in stop_token_ids:
            ids.pop()
        return self._decoder.decode(ids)

    def _facts(
        self, key: int, num_samples: int, prompt: Prompt, trajectory: Trajectory, score: Score
    ) -> TrajectoryFacts:
        versions = trajectory.versions[trajectory.loss_mask]
        return TrajectoryFacts(
            index=key,
            group=key // num_samples,
            owner=self._group.world.rank,
            domain=prompt.domain,
            num_tokens=len(trajectory.tokens),
            num_trained_tokens=int(trajectory.loss_mask.sum()),
            logprob_sum=float(trajectory.rollout_logprobs.sum(dtype=np.float64)),
            score=score,
            status=trajectory.status,
            min_version=int(versions.min()) if len(versions) else self.version,
            max_version=int(versions.max()) if len(versions) else self.version,
        )
