"""The same trajectories give the same weights, however they and the model are spread.

Three steps of two updates each, from trajectories to weights through the batcher, the algorithm and
the roles. The update is plain descent: Adam without momentum whose eps outweighs every gradient, so
that an error in a gradient stays as small in the weights (Adam's own division would blow up those
of tiny gradients).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.algorithms.algorithm import Algorithm
from rlhf.algorithms.values import critic_loss
from rlhf.config.schema import AlgorithmSection, ModelSection, OptimizerSection, TrainSection
from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import TrainLayout, sequence_multiple
from rlhf.dist.replicas import Replicas
from rlhf.dist.stop import Stopper
from rlhf.dist.world import World
from rlhf.packing import Budget, sequence_cost
from rlhf.rollout.batcher import Batcher
from rlhf.types import Rollout, Score, Status, Trajectory, TrajectoryFacts
from rlhf.weights.families import train_pieces
from rlhf.weights.hf_checkpoint import load_pieces
from rlhf.weights.model_shape import load_model_shape
from rlhf.weights.value_model import load_value_model
from tests.dist.parity_case import LAYOUT_KEYS
from tests.dist.parity_compare import whole_tensors
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny_classifier

TOLERANCE = 1e-5
MOVED = 10 * TOLERANCE
NUM_STEPS, NUM_UPDATES = 3, 2
TEMPERATURE = 0.8
EPS = 1e4
RATES = {"actor": 0.5, "critic": 0.02}  # what the critic bears
SIZES = {"vocab_size": 515, "hidden_size": 96}
ALGORITHMS = {
    "grpo": AlgorithmSection(name="grpo", entropy_coef=0.01, aggregation="sequence-mean"),
    "ppo": AlgorithmSection(name="ppo"),
}
SP = {"sequence_parallel": True}


@dataclass(frozen=True)
class Case:
    name: str
    train: dict[str, Any] = field(default_factory=dict)
    tokens: int = 96  # budget of a micro-batch


REFERENCE = Case("one rank", tokens=4096)  # one micro-batch
LAUNCHES = {
    1: [REFERENCE, Case("many micro-batches"), Case("one or two sequences each", tokens=48)],
    2: [
        Case("tp2 sp", {"tp": 2, **SP}),
        Case("pp2", {"pp": 2}),
        Case("dp2", tokens=64),
        Case("cp2", {"cp": 2}),
        Case("cp2 one micro-batch", {"cp": 2}, tokens=4096),
    ],
    4: [
        Case("tp2 sp cp2", {"tp": 2, "cp": 2, **SP}),
        Case("pp2 vpp2 dp2", {"pp": 2, "vpp": 2}),
        Case("cp2 dp2", {"cp": 2}),
    ],
}
SLOW = {4}


def _rollout(step: int, vocab: int, world: int) -> Rollout:
    """Four prompts with four answers each; those to the last prompt are equally good."""
    rng = np.random.default_rng(step)
    facts, trajectories = [], {}
    for index in range(16):
        group = index // 4
        prompt, answer = 2 + 5 * group, int(rng.integers(1, 24))
        mask = np.arange(prompt + answer) >= prompt
        tokens = rng.integers(3, vocab, prompt + answer).astype(np.int32)
        tokens[:prompt] = np.arange(prompt) + 3 + 40 * group
        score = float(rng.integers(0, 3)) if group < 3 else 1.0
        trajectories[index] = Trajectory(
            prompt_uid=str(group),
            sample=index % 4,
            tokens=tokens,
            loss_mask=mask,
            rollout_logprobs=-mask.astype(np.float32),
            versions=np.where(mask, step, -1).astype(np.int32),
            status=Status.STOPPED,
        )
        facts.append(
            TrajectoryFacts(
                index=index,
                group=group,
                owner=index % world,
                domain="tests",
                num_tokens=len(tokens),
                num_trained_tokens=answer,
                logprob_sum=-float(answer),
                score=Score(score, {}),
                status=Status.STOPPED,
                min_version=step,
                max_version=step,
            )
        )
    return Rollout(tuple(facts), trajectories, ())


class _Run:
    """The parts of a run that stand between trajectories and weights."""

    def __init__(self, rank: int, world: int, folder: Path, case: Case, algorithm: str) -> None:
        from rlhf.mcore import parallel

        self.layout = TrainLayout(world, **{k: v for k, v in case.train.items() if k in LAYOUT_KEYS})
        self.train = TrainSection(**case.train)
        parallel.initialize(self.layout, timeout_s=60, seed=1)
        self.rank, self.folder, self.shape = rank, folder, load_model_shape(folder / "actor")
        group = PhaseGroup.create(World(rank, world, rank, world), 60)
        self.gate = PhaseGate(group, Stopper(rank, 5))
        replicas = Replicas(self.layout, group)
        self.algorithm = Algorithm(ALGORITHMS[algorithm], 24, replicas.total)
        self.batcher = Batcher(
            rule=self.algorithm,
            layout=self.layout,
            group=group,
            gate=self.gate,
            budget=Budget(
                tokens=case.tokens,
                align=sequence_multiple(
                    self.train.tp, self.train.cp, self.train.sequence_parallel
                ),
                multiple=self.train.pp if self.train.vpp > 1 else 1,
            ),
            cost=sequence_cost(self.shape),
            num_updates=NUM_UPDATES,
            device=torch.device("cpu"),
        )
        self.actor = self._actor()
        self.critic = self._critic() if self.algorithm.needs_critic else None

    def _trained(self, folder: Path, shape: Any, pieces: Any, head: Any) -> dict[str, Any]:
        from rlhf.mcore.model import build_model
        from rlhf.mcore.optimizer import build_optimizer

        section = ModelSection(path=str(folder), dtype="float32")
        model = build_model(shape, self.layout, section, self.train, trainable=True, head=head)
        load_pieces(folder, pieces, model.params)
        descent = OptimizerSection(lr=RATES[folder.name] * EPS, beta1=0, eps=EPS, clip_grad=0)
        return {"model": model, "optimizer": build_optimizer(model, descent, 100)}

    def _actor(self) -> Any:
        from rlhf.roles.actor import Actor

        folder = self.folder / "actor"
        pieces = train_pieces(self.shape, self.layout, self.rank)
        return Actor(
            **self._trained(folder, self.shape, pieces, "logprobs"),
            loss_fn=self.algorithm.loss_fn,
            temperature=TEMPERATURE,
            first_step=0,
            gate=self.gate,
            on_update=lambda stats: None,
        )

    def _critic(self) -> Any:
        from rlhf.roles.critic import Critic

        folder = self.folder / "critic"
        source = load_value_model(folder, needs_head=True)
        pieces = source.pieces(self.layout, self.rank)
        return Critic(
            **self._trained(folder, source.shape, pieces, "values"),
            loss_fn=partial(critic_loss, clip=0.2),
            values_ends=False,
            gate=self.gate,
            on_update=lambda stats: None,
        )

    def steps(self) -> None:
        """As ``rlhf.loop`` has them."""
        for step in range(NUM_STEPS):
            rollout = _rollout(step, SIZES["vocab_size"], self.layout.world)
            batch = self.batcher.pack(rollout, step)
            batch = batch.with_columns(
                old_logprobs=self.actor.logprobs(batch, step),
                **(self.critic.values(batch, step) if self.critic else {}),
            )
            batch = self.algorithm.assign_advantages(batch)
            for minibatch in batch.minibatches():
                if self.critic:
                    self.critic.update(minibatch, step)
                self.actor.update(minibatch, step)


def _run_cases(rank: int, world: int, folder: str, cases: list[Case]) -> dict[Any, Any]:
    from rlhf.mcore import parallel
    from rlhf.platform.megatron_cpu import install

    install()
    out = {}
    for case in cases:
        for algorithm in ALGORITHMS:
            run = _Run(rank, world, Path(folder), case, algorithm)
            run.steps()
            for role in (run.actor, run.critic) if run.critic else (run.actor,):
                params = {n: p.detach().numpy().copy() for n, p in role.model.params.items()}
                out[case.name, algorithm, type(role).__name__] = params
            parallel.shutdown()
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tests.helpers.tiny_models import make_tiny

    folder = tmp_path_factory.mktemp("models")
    make_tiny(folder / "actor", "qwen2", **SIZES)
    make_tiny_classifier(folder / "critic", "qwen2", seed=1, **SIZES)
    return folder


@pytest.fixture(scope="module")
def weights(folder):
    """(world, case, algorithm, role) -> HF tensors; a world is launched when first asked for."""
    done: dict[int, list[dict[Any, Any]]] = {}

    def of(world: int, case: Case, algorithm: str, role: str) -> dict[str, np.ndarray]:
        if world not in done:
            args = (str(folder), LAUNCHES[world])
            done[world] = run_ranks(_run_cases, world, *args, timeout_s=500)
        layout = TrainLayout(world, **{k: v for k, v in case.train.items() if k in LAYOUT_KEYS})
        pieces = [_pieces(folder, layout, rank, role) for rank in range(world)]
        return whole_tensors(pieces, [rank[case.name, algorithm, role] for rank in done[world]])

    return of


def _pieces(folder: Path, layout: TrainLayout, rank: int, role: str) -> Any:
    if role == "Critic":
        return load_value_model(folder / "critic", needs_head=True).pieces(layout, rank)
    return train_pieces(load_model_shape(folder / "actor"), layout, rank)


ROLES = [("grpo", "Actor"), ("ppo", "Actor"), ("ppo", "Critic")]


@pytest.mark.parametrize(("algorithm", "role"), ROLES)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=case.name, marks=[pytest.mark.slow] if world in SLOW else [])
        for world, cases in LAUNCHES.items()
        for case in cases
        if case is not REFERENCE
    ],
)
def test_weights_equal_those_of_one_rank_and_one_micro_batch(weights, world, case, algorithm, role):
    expected = weights(1, REFERENCE, algorithm, role)
    got = weights(world, case, algorithm, role)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(("algorithm", "role"), ROLES)
def test_the_updates_are_large_against_the_tolerance(weights, folder, algorithm, role):
    """Else the law above would hold for any gradient."""
    from safetensors.torch import load_file

    before = load_file(folder / role.lower() / "model.safetensors")
    after = weights(1, REFERENCE, algorithm, role)
    for name, tensor in after.items():
        assert np.abs(tensor - before[name].numpy()).max() > MOVED, name
