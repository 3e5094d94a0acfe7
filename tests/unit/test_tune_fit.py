"""Constants that a machine really has are found back from the seconds of its phases."""

from __future__ import annotations

import pytest

from rlhf.config.load import load_config
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.planner.contract import Promise, measured_load
from rlhf.planner.job import job_of, load_of
from rlhf.planner.memory import Machine
from rlhf.planner.speeds import CPU, read_speeds, write_speeds
from rlhf.planner.step_time import Moved
from rlhf.tune.calibrate import calibrate
from rlhf.tune.fit import fit
from rlhf.tune.records import Pass, Round
from rlhf.weights.find_model import find_model

REAL = CPU.model_copy(
    update={
        "peak_tflops": 0.35,
        "layer_s": 2e-3,
        "microbatch_s": 0.02,
        "update_s": 0.2,
        "decode_step_s": 0.03,
        "reshard_s": 0.2,
        "switch_s": 0.1,
        "save_s": 1.0,
        "answer_pack_s": 5e-5,
    }
)
SIZES = (768, 192, 3072)


@pytest.fixture(scope="module")
def promise():
    config = load_config("configs/demo.yaml")
    shape = find_model("configs/models/smollm2-135m.json")
    job = job_of(config, shape, TrainLayout(2, pp=2), RolloutLayout(2), 32 << 20)
    machine = Machine(int(12e9), int(24e9), 2, int(1e9))
    return Promise(job, machine, 2560, Moved(0.3, 0.0), CPU), load_of(config)


def rounds_of(promise, load, speeds, share):
    """What a machine with these constants would have measured."""
    around = promise.seconds(speeds, load)
    passes = []
    for size in SIZES:
        sized = load.__class__(**{**_fields(load), "microbatch_tokens": size})
        seconds = promise.pass_seconds(speeds, sized, share)
        passes.append(Pass(size, 1, 1, {**seconds, "pack": around["pack"]}))
    one = Round(
        answers=128,
        trained_answers=round(128 * share),
        prompt_tokens=load.prompt_tokens,
        answer_tokens=load.answer_tokens,
        longest_answer_tokens=load.longest_answer_tokens,
        seconds={name: around[name] for name in ("rollout", "reshard", "switch")},
        passes=passes,
        save_s=around["save"],
    )
    return [one] * 3


def _fields(load):
    return {name: getattr(load, name) for name in load.__slots__}


def test_predictions_by_the_fitted_constants_are_what_the_machine_measured(promise, tmp_path):
    promised, load = promise
    rounds = rounds_of(promised, load, REAL, share=0.75)
    found = calibrate(promised, load, CPU, rounds, size=768, device="here").fitted
    assert {f"{n}, {s}" for n in ("score_actor", "update_actor") for s in SIZES} | {
        *("rollout", "reshard", "switch", "pack", "save")
    } == set(found.measured)
    assert max(abs(error) for error in found.errors.values()) < 0.1, found.errors
    other = load_of(load_config("configs/demo.yaml", ["batch.prompts_per_step=32"]))
    want, have = promised.seconds(REAL, other), promised.seconds(found.speeds, other)
    for phase in ("score_actor", "update_actor"):
        assert have[phase] == pytest.approx(want[phase], rel=0.25), "also of another load"
    write_speeds(found.speeds, tmp_path / "speeds.yaml", "of a test")
    assert read_speeds(tmp_path / "speeds.yaml") == found.speeds


def test_passes_are_over_the_answers_that_are_trained(promise):
    promised, load = promise
    whole, half = promised.seconds(CPU, load), promised.seconds(CPU, load, trained_share=0.5)
    assert half["update_actor"] < 0.7 * whole["update_actor"]
    assert half["rollout"] == whole["rollout"]
    assert promised.pass_seconds(CPU, load, 0.5).items() <= half.items()


def test_a_run_s_own_lengths_replace_those_that_were_assumed(promise):
    _, load = promise
    seen = measured_load(load, {"rollout/prompt_tokens": 21.0, "rollout/answer_tokens": 4.5})
    assert (seen.prompt_tokens, seen.answer_tokens) == (21.0, 4.5)
    assert seen.prompts == load.prompts


def test_nothing_measured_is_said():
    with pytest.raises(ValueError, match="no phase was measured"):
        fit(CPU, [], lambda speeds: {})
