"""Whole training steps on gloo ranks from a rollout of fixed numbers: all parts but the engines.

Every rank owns some trajectories, as if its engine had sampled them; the step packs them, lets the
roles score them, assigns advantages and updates. What comes out must not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlhf.types import Rollout, Score, Status, Trajectory, TrajectoryFacts

PROMPTS, SAMPLES, STEPS = 4, 4, 3
VOCAB = 512


@dataclass(frozen=True)
class Case:
    """A layout and how micro-batches are cut."""

    name: str
    world: int = 1
    train: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Of one rank. ``params``: role -> [(HF tensor, region, values)] after all steps."""

    params: dict[str, list[tuple[str, tuple, np.ndarray]]]
    columns: dict[int, dict[str, list[float]]]  # of the first step, by trajectory
    scores: dict[int, Score]  # of the first step


def trajectories(step: int) -> list[tuple[TrajectoryFacts, Trajectory]]:
    """Answers of several lengths, some with text between their tokens, some cut off."""
    rng = np.random.default_rng(step)
    out = []
    for prompt in range(PROMPTS):
        asked = rng.integers(3, VOCAB, rng.integers(1, 9))
        for sample in range(SAMPLES):
            answer = rng.integers(3, VOCAB, rng.integers(1, 9))
            tokens = np.concatenate([asked, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(asked)
            if len(answer) > 4:
                mask[-4:-2] = False  # a tool's text
            status = Status.LENGTH if rng.random() < 0.3 else Status.STOPPED
            index = prompt * SAMPLES + sample
            logprobs = np.where(mask, -rng.random(len(tokens)) * 6, 0).astype(np.float32)
            trajectory = Trajectory(
                prompt_uid=str(prompt),
                sample=sample,
                tokens=tokens,
                loss_mask=mask,
                rollout_logprobs=logprobs,
                versions=np.where(mask, 0, -1).astype(np.int32),
                status=status,
            )
            facts = TrajectoryFacts(
                index=index,
                group=prompt,
                owner=0,
                domain="d",
                num_tokens=len(tokens),
                num_trained_tokens=int(mask.sum()),
                logprob_sum=float(logprobs.sum()),
                score=Score(float(rng.integers(0, 3)), {}),
                status=status,
                min_version=0,
                max_version=0,
            )
            out.append((facts, trajectory))
    return out


def rollout(step: int, rank: int, world: int) -> Rollout:
    """Facts of all, tokens of those that this rank owns."""
    from dataclasses import replace

    every = [(replace(f, owner=f.index % world), t) for f, t in trajectories(step)]
    return Rollout(
        facts=tuple(f for f, _ in every),
        trajectories={f.index: t for f, t in every if f.owner == rank},
        samples=(),
    )


def run_cases(
    rank: int, world: int, raw: Mapping[str, Any], cases: Sequence[Case]
) -> dict[str, Outcome]:
    """Entry of a spawned rank. ``raw``: a configuration without its section ``train``."""
    from rlhf.platform.megatron_cpu import install

    install()
    return {case.name: _run_case(rank, world, raw, case) for case in cases}


def _run_case(rank: int, world: int, raw: Mapping[str, Any], case: Case) -> Outcome:
    from rlhf.algorithms.algorithm import build_algorithm
    from rlhf.dist.replicas import Replicas
    from rlhf.mcore import parallel
    from rlhf.memory_parts import Memory
    from rlhf.parts import build_batcher
    from rlhf.recorder import Recorder
    from rlhf.role_parts import build_actor, build_critic, build_reference, build_reward_model

    ground = _ground(rank, world, {**raw, "train": dict(case.train)})
    plan, config = ground.plan, ground.plan.config
    parallel.initialize(plan.train, 60, config.seed)
    try:
        algorithm = build_algorithm(config, Replicas(plan.train, ground.group).total)
        recorder = Recorder.create(ground, record=False)
        batcher = build_batcher(ground, algorithm)
        memory = Memory.of(ground)
        actor = build_actor(ground, memory, algorithm, recorder)
        reference = build_reference(ground, memory, algorithm)
        critic = build_critic(ground, memory, recorder)
        reward_model = build_reward_model(ground, memory, batcher)
        for step in range(STEPS):
            scored = reward_model.score(rollout(step, rank, world), step)
            batch = batcher.pack(scored, step)
            batch = batch.with_columns(
                old_logprobs=actor.logprobs(batch, step),
                ref_logprobs=reference.logprobs(batch, step),
                **critic.values(batch, step),
            )
            batch = algorithm.assign_advantages(batch)
            if step == 0:
                columns = _by_trajectory(batch)
                scores = {f.index: f.score for f in scored.facts}
            for minibatch in batch.minibatches():
                critic.update(minibatch, step)
                actor.update(minibatch, step)
        return Outcome(_params(plan, actor, critic), columns, scores)
    finally:
        parallel.shutdown()


def _ground(rank: int, world: int, raw: Mapping[str, Any]) -> Any:
    from rlhf.config.check import train_layout
    from rlhf.config.load import load_text
    from rlhf.config.schema import Config
    from rlhf.config.yaml_text import dump_yaml
    from rlhf.dist.gate import PhaseGate
    from rlhf.dist.groups import PhaseGroup
    from rlhf.dist.layout import RolloutLayout
    from rlhf.dist.stop import Stopper
    from rlhf.dist.world import World
    from rlhf.ground import Ground, Plan
    from rlhf.weights.model_shape import load_model_shape

    config = load_text(Config, dump_yaml(raw), "case")
    place = World(rank, world, rank, world)
    plan = Plan(
        config=config,
        world=place,
        shape=load_model_shape(config.model.path),
        train=train_layout(config.train, world),
        rollout=RolloutLayout(world, tp=1, dp=1, ep=1, pp=1, a2a="none"),
    )
    stopper = Stopper(rank, 60)
    group = PhaseGroup.create(place, 60)
    return Ground(plan, stopper, torch.device("cpu"), group, PhaseGate(group, stopper), [])


def _by_trajectory(batch: Any) -> dict[int, dict[str, list[float]]]:
    names = ("old_logprobs", "ref_logprobs", "values", "end_values", "advantages", "returns")
    out = {}
    for (begin, _), sequences in zip(batch.micro_bounds, batch.sequences, strict=True):
        for s in sequences:
            here = slice(begin + s.start, begin + s.start + s.length)
            written = {n: getattr(batch, n) for n in names if getattr(batch, n) is not None}
            out[s.index] = {name: column[here].tolist() for name, column in written.items()}
    return out


def _params(plan: Any, actor: Any, critic: Any) -> dict[str, list[tuple[str, tuple, np.ndarray]]]:
    from rlhf.roles.critic import Critic
    from rlhf.weights.families import train_pieces
    from rlhf.weights.value_model import load_value_model

    held = {"actor": (actor, train_pieces(plan.shape, plan.train, plan.world.rank))}
    if isinstance(critic, Critic):
        source = load_value_model(plan.config.critic.path, needs_head=False)
        held["critic"] = (critic, source.pieces(plan.train, plan.world.rank))
    out: dict[str, list[tuple[str, tuple, np.ndarray]]] = {}
    for name, (role, pieces) in held.items():
        out[name] = [
            (
                p.tensor,
                p.region,
                role.model.params[p.param]
                .detach()[tuple(slice(*dim) for dim in p.local)]
                .reshape([stop - start for start, stop in p.region])
                .numpy(),
            )
            for p in pieces
        ]
    return out
