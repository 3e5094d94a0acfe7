"""The same trajectories give the same step under every layout and any cut into micro-batches.

Parameters after three steps of two updates each, for GRPO and PPO, on a dense model and on one with
experts; columns and scores of the first step; those of critic and reward model equal transformers.
The update is plain descent: Adam without momentum whose eps outweighs every gradient, so that an
error in a gradient stays as small in the weights (Adam's own division would blow up those of tiny
gradients).
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
SP = {"sequence_parallel": True}
CASES = [
    REFERENCE,
    Case("one rank, small micro-batches", 1, {"tokens_per_microbatch": 20}),
    Case("tp2 sp", 2, {"tp": 2, **SP}),
    Case("pp2", 2, {"pp": 2, "tokens_per_microbatch": 40}),
    Case("pp2 vpp2", 2, {"pp": 2, "vpp": 2, "tokens_per_microbatch": 40}),
    Case("dp2", 2, {"tokens_per_microbatch": 40}),
    Case("cp2", 2, {"cp": 2, "tokens_per_microbatch": 40}),
    Case("tp2 sp cp2", 4, {"tp": 2, "cp": 2, **SP, "tokens_per_microbatch": 40}),
    Case("pp2 vpp2 dp2", 4, {"pp": 2, "vpp": 2, "tokens_per_microbatch": 40}),
    Case("cp2 dp2", 4, {"cp": 2, "tokens_per_microbatch": 40}),
]
WITH_EXPERTS = [
    REFERENCE,
    Case("ep2", 2, {"ep": 2, "tokens_per_microbatch": 40}),
    Case("tp2 sp ep2 etp1", 2, {"tp": 2, **SP, "ep": 2, "etp": 1}),
    Case("ep2 pp2", 4, {"ep": 2, "pp": 2, "tokens_per_microbatch": 40}),
]
SLOW = {4}
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
ALGORITHMS |= {"grpo, experts": {"name": "grpo"}, "ppo, experts": ALGORITHMS["ppo"]}
EPS = 1e4
SGD = {"lr": 0.5 * EPS, "beta1": 0.0, "eps": EPS, "clip_grad": 1.0}


def _has_experts(name):
    return name.endswith("experts")


def _model(name):
    return "experts" if _has_experts(name) else "model"


def _config(folder, name):
    out = {
        "run_dir": str(folder / "run"),
        "num_steps": 3,
        "model": {
            "path": str(folder / _model(name)),
            "dtype": "float32",
        },
        "data": {"train": [{"type": "jsonl", "name": "d", "path": "none.jsonl"}]},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2},
        "optimizer": SGD,
        "algorithm": ALGORITHMS[name],
    }
    if name == "ppo, experts":
        out["critic"] = {"path": str(folder / "experts"), "head_std": 0.02, "optimizer": SGD}
    if name == "ppo":
        out["critic"] = {"path": str(folder / "critic"), "optimizer": SGD}
        out["reward_model"] = {"path": str(folder / "reward_model"), "weight": 0.5}
    return out


def _run(rank, world, configs, cases):
    return {name: run_cases(rank, world, raw, cases[name]) for name, raw in configs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    make_tiny(folder / "model", "qwen2")
    make_tiny(folder / "experts", "qwen3_moe")
    make_tiny_classifier(folder / "critic", "qwen2", seed=1)
    make_tiny_classifier(folder / "reward_model", "qwen3", seed=2)
    return folder


def _cases(name):
    return WITH_EXPERTS if _has_experts(name) else CASES


@pytest.fixture(scope="module")
def outcomes(folder):
    """(algorithm, case) -> the outcomes of its ranks; a world is launched when first asked for."""
    done: dict[int, list[dict[str, dict[str, Outcome]]]] = {}

    def of(name: str, case: Case) -> list[Outcome]:
        if case.world not in done:
            configs = {name: _config(folder, name) for name in ALGORITHMS}
            cases = {name: [c for c in _cases(name) if c.world == case.world] for name in configs}
            done[case.world] = run_ranks(_run, case.world, configs, cases, timeout_s=400)
        return [rank[name][case.name] for rank in done[case.world]]

    return of


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


COMPARISONS = [
    pytest.param(name, case, id=f"{name}, {case.name}", marks=pytest.mark.slow)
    if case.world in SLOW
    else pytest.param(name, case, id=f"{name}, {case.name}")
    for name in ALGORITHMS
    for case in _cases(name)
    if case is not REFERENCE
]


@pytest.mark.parametrize(("name", "case"), COMPARISONS)
def test_parameters_after_three_steps_equal_one_rank(outcomes, folder, name, case):
    (expected,) = outcomes(name, REFERENCE)
    for role, pieces in expected.params.items():
        whole = _whole(pieces)
        for rank in outcomes(name, case):
            for tensor, region, values in rank.params[role]:
                want = whole[tensor][tuple(slice(*dim) for dim in region)]
                np.testing.assert_allclose(
                    values, want, rtol=0, atol=TOLERANCE, err_msg=f"{role} {tensor}"
                )


@pytest.mark.parametrize(("name", "case"), COMPARISONS)
def test_columns_and_scores_equal_one_rank(outcomes, name, case):
    (expected,) = outcomes(name, REFERENCE)
    seen = set()
    for rank in outcomes(name, case):
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_steps_moved_every_tensor(outcomes, folder, name):
    """Otherwise the comparison above would prove nothing."""
    from safetensors.torch import load_file

    (outcome,) = outcomes(name, REFERENCE)
    critic = "critic" if name == "ppo" else _model(name)
    for role, model in (("actor", _model(name)), ("critic", critic)):
        if role in outcome.params:
            before = load_file(folder / model / "model.safetensors")
            for tensor, values in _whole(outcome.params[role]).items():
                if tensor not in before:  # a new head
                    continue
                moved = np.abs(values - before[tensor].numpy()).max()
                assert moved > 10 * TOLERANCE, f"{role} {tensor}"


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
    (outcome,) = outcomes("ppo", REFERENCE)
    for facts, _ in trajectories(0):
        score, value = outcome.scores[facts.index], float(wanted[facts.index][-1])
        assert score.parts["reward_model"] == pytest.approx(value, abs=TOLERANCE)
        assert score.value == pytest.approx(facts.score.value + 0.5 * value, abs=TOLERANCE)


def test_values_are_those_before_each_trained_token_and_after_a_cut_off_answer(outcomes, folder):
    wanted = _values_of(folder / "critic")
    (outcome,) = outcomes("ppo", REFERENCE)
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
