"""The same trajectories give the same step under every layout and any cut into micro-batches.

Parameters after three steps of two updates each, for GRPO and PPO; columns and scores of the first
step; those of critic and reward model equal transformers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.dist.step_case import Case, Outcome, run_cases, trajectories
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny, make_tiny_classifier

TOLERANCE = 1e-5
REFERENCE = Case("one rank")
CASES = [
    REFERENCE,
    Case("one rank, small micro-batches", 1, {"tokens_per_microbatch": 20}),
    Case("tp2 sp", 2, {"tp": 2, "sequence_parallel": True}),
    Case("pp2", 2, {"pp": 2, "tokens_per_microbatch": 40}),
    Case("pp2 vpp2", 2, {"pp": 2, "vpp": 2, "tokens_per_microbatch": 40}),
    Case("dp2", 2, {"tokens_per_microbatch": 40}),
    Case("cp2", 2, {"cp": 2, "tokens_per_microbatch": 40}),
]
ALGORITHMS = {
    "grpo": {"name": "grpo", "kl": {"place": "loss", "coef": 0.1}},
    "ppo": {
        "name": "ppo",
        "dual_clip": 3.0,
        "entropy_coef": 0.01,
        "kl": {"place": "reward", "estimator": "k1", "coef": 0.1},
        "gae": {"gamma": 0.9, "lam": 0.8, "bootstrap_truncated": True},
    },
}
# Adam whose step is nearly proportional to the gradient: a sign would blow up rounding
SGD = {"lr": 0.5, "eps": 1.0, "clip_grad": 1.0}


def _config(folder, name):
    out = {
        "run_dir": str(folder / "run"),
        "num_steps": 3,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": [{"type": "jsonl", "name": "d", "path": "none.jsonl"}]},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2},
        "optimizer": SGD,
        "algorithm": ALGORITHMS[name],
    }
    if name == "ppo":
        out["critic"] = {"path": str(folder / "critic"), "optimizer": SGD}
        out["reward_model"] = {"path": str(folder / "reward_model"), "weight": 0.5}
    return out


def _run(rank, world, configs, cases):
    return {name: run_cases(rank, world, raw, cases) for name, raw in configs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    make_tiny(folder / "model", "qwen2")
    make_tiny_classifier(folder / "critic", "qwen2", seed=1)
    make_tiny_classifier(folder / "reward_model", "qwen3", seed=2)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder) -> dict[tuple[str, str], list[Outcome]]:
    configs = {name: _config(folder, name) for name in ALGORITHMS}
    out = {}
    for world in (1, 2):
        cases = [c for c in CASES if c.world == world]
        ranks = run_ranks(_run, world, configs, cases, timeout_s=300)
        for name in ALGORITHMS:
            for case in cases:
                out[name, case.name] = [r[name][case.name] for r in ranks]
    return out


def _whole(pieces):
    """HF tensor -> values, from the pieces of one rank that holds everything."""
    sizes: dict[str, tuple[int, ...]] = {}
    for tensor, region, _ in pieces:
        stops = tuple(stop for _, stop in region)
        sizes[tensor] = tuple(map(max, stops, sizes.get(tensor, stops)))
    out = {tensor: np.full(size, np.nan, np.float32) for tensor, size in sizes.items()}
    for tensor, region, values in pieces:
        out[tensor][tuple(slice(*dim) for dim in region)] = values
    assert not any(np.isnan(values).any() for values in out.values())
    return out


OTHERS = [c for c in CASES if c is not REFERENCE]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_parameters_after_three_steps_equal_one_rank(outcomes, folder, name, case):
    (expected,) = outcomes[name, REFERENCE.name]
    for role, pieces in expected.params.items():
        whole = _whole(pieces)
        for rank in outcomes[name, case.name]:
            for tensor, region, values in rank.params[role]:
                want = whole[tensor][tuple(slice(*dim) for dim in region)]
                np.testing.assert_allclose(
                    values, want, rtol=0, atol=TOLERANCE, err_msg=f"{role} {tensor}"
                )


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_columns_and_scores_equal_one_rank(outcomes, name, case):
    (expected,) = outcomes[name, REFERENCE.name]
    seen = set()
    for rank in outcomes[name, case.name]:
        for index, columns in rank.columns.items():
            seen.add(index)
            assert columns.keys() == expected.columns[index].keys()
            for column, values in columns.items():
                want = expected.columns[index][column]
                np.testing.assert_allclose(values, want, rtol=0, atol=2e-5, err_msg=column)
        assert rank.scores.keys() == expected.scores.keys()
        for index, score in rank.scores.items():
            assert score.value == pytest.approx(expected.scores[index].value, abs=TOLERANCE)
    assert seen == set(expected.columns)


def test_the_steps_moved_both_models(outcomes, folder):
    """Otherwise the comparison above would prove nothing."""
    from safetensors.torch import load_file

    (outcome,) = outcomes["ppo", REFERENCE.name]
    for role, name in (("actor", "model"), ("critic", "critic")):
        before = load_file(folder / name / "model.safetensors")
        after = _whole(outcome.params[role])
        moved = max(np.abs(values - before[t].numpy()).max() for t, values in after.items())
        assert moved > 1e-3


def _values_of(folder):
    """Trajectory -> the value after each of its tokens, by transformers."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    out = {}
    for facts, trajectory in trajectories(0):
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        with torch.no_grad():
            out[facts.index] = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
            last = float(model(tokens).logits[0, 0])
        assert float(out[facts.index][-1]) == pytest.approx(last, abs=1e-6)
    return out


def test_reward_model_adds_what_transformers_says(outcomes, folder):
    wanted = _values_of(folder / "reward_model")
    (outcome,) = outcomes["ppo", REFERENCE.name]
    for facts, _ in trajectories(0):
        score, value = outcome.scores[facts.index], float(wanted[facts.index][-1])
        assert score.parts["reward_model"] == pytest.approx(value, abs=TOLERANCE)
        assert score.value == pytest.approx(facts.score.value + 0.5 * value, abs=TOLERANCE)


def test_values_are_those_before_each_trained_token_and_after_a_cut_off_answer(outcomes, folder):
    wanted = _values_of(folder / "critic")
    (outcome,) = outcomes["ppo", REFERENCE.name]
    cut_off = 0
    for facts, trajectory in trajectories(0):
        after, mask = wanted[facts.index], torch.from_numpy(trajectory.loss_mask)
        columns = outcome.columns[facts.index]
        before = torch.where(mask, after.roll(1), 0.0)
        assert columns["values"] == pytest.approx(before.tolist(), abs=TOLERANCE)
        end = torch.zeros(len(mask))
        if facts.status == "length":
            last = int(mask.nonzero()[-1])
            end[last] = after[last]
            cut_off += 1
        assert columns["end_values"] == pytest.approx(end.tolist(), abs=TOLERANCE)
    assert 0 < cut_off < len(trajectories(0))
