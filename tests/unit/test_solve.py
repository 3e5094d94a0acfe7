"""The solver finds the shortest step of all pairs that fit, no longer than what is published."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.bench.reshard_plan import RECIPES, Recipe
from rlhf.cli import main
from rlhf.config.faults import ConfigError
from rlhf.config.load import load_config
from rlhf.config.schema import MemorySection, ModelSection, RolloutSection, TrainSection
from rlhf.planner.candidates import Fixed, rollout_candidates, train_candidates
from rlhf.planner.fit import misfits
from rlhf.planner.least import cannot_fit, least_bytes
from rlhf.planner.memory import Job, Machine, ledger
from rlhf.planner.solve import solution_of, solve
from rlhf.planner.solve_report import loses, setting_words
from rlhf.planner.speeds import H100
from rlhf.solved import resolved
from tests.helpers.runs import tiny_config
from tests.helpers.shapes import rollout_layouts, shapes, train_layouts
from tests.helpers.solving import MACHINE, as_published, load, whole

IN_CI = {"qwen3-235b-a22b": 64}
SMALL = frozenset({"cp", "vpp", "first", "last"})


def _in_ci(case: Recipe) -> bool:
    return IN_CI.get(case.model) == case.ranks


@pytest.mark.parametrize(
    "case",
    [pytest.param(r, id=r.name, marks=[] if _in_ci(r) else [pytest.mark.slow]) for r in RECIPES],
)
def test_the_pick_is_at_least_as_good_as_a_published_recipe(case):
    job = whole(case.model, case.ranks)
    work = load(job)
    found = solve(job, H100, work, MACHINE, Fixed())
    own = as_published(job, case)
    published = solution_of(own, ledger(own, MACHINE), H100, work, MACHINE)
    best = found.solutions[0]
    assert not misfits(best.job, best.ledger, MACHINE)
    assert best.step_s <= published.step_s
    assert [s.step_s for s in found.solutions] == sorted(s.step_s for s in found.solutions)
    assert found.whole


@pytest.mark.parametrize("gb", [80, 48])
def test_the_best_of_a_search_is_the_best_of_all_pairs(gb):
    """Counted in full, without bounds, but for the engines' share of the device."""
    machine = Machine(gb * 10**9, 2000 * 10**9, 8, 8 * 10**9)
    job = whole("qwen2.5-7b", 4, 4096, memory=MemorySection(optimizer="host"))
    work, fixed = load(job), Fixed(SMALL)
    found = solve(job, H100, work, machine, fixed)
    steps = []
    for train in train_candidates(job, machine, fixed):
        for engines in rollout_candidates(job, machine, fixed):
            for share in (0.7, 0.5, 0.3):
                rollout = engines.rollout.model_copy(update={"mem_fraction": share})
                pair = replace(train, rollout=rollout, rollout_layout=engines.rollout_layout)
                held = ledger(pair, machine)
                if not misfits(pair, held, machine):
                    steps.append(solution_of(pair, held, H100, work, machine).step_s)
                    break
    assert found.solutions[0].step_s <= min(steps) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_phase_never_needs_less_than_the_bound(data):
    shape = data.draw(shapes())
    layout = data.draw(train_layouts(shape))
    engines = data.draw(rollout_layouts(shape, layout.world))
    job = Job(
        shape=shape,
        train_layout=layout,
        rollout_layout=engines,
        model=ModelSection(path="any"),
        train=TrainSection(sequence_parallel=layout.tp > 1),
        rollout=RolloutSection(mem_fraction=data.draw(st.sampled_from([0.1, 0.6]))),
        memory=MemorySection(
            time_slice=data.draw(st.sampled_from(["engine", "all"])),
            optimizer=data.draw(st.sampled_from(["device", "host"])),
        ),
        window_bytes=2**20,
        longest_tokens=128,
        reference=data.draw(st.booleans()),
    )
    machine = Machine(10**9, 10**12, 8, 10**6)
    held = ledger(job, machine)
    cache = data.draw(st.booleans()) and held.kv_tokens >= job.longest_tokens
    for span, least in least_bytes(job, machine, any_cache=cache).items():
        assert least <= max(held.phase_bytes(span))


def test_what_is_given_stays():
    job = whole("qwen3-30b-a3b", 16, 4096)
    given = replace(
        job,
        train=job.train.model_copy(update={"tp": 2, "tokens_per_microbatch": 8192}),
        rollout=job.rollout.model_copy(update={"tp": 8, "mem_fraction": 0.5}),
    )
    fixed = Fixed(
        frozenset({"tp", "tokens_per_microbatch"}), frozenset({"tp", "mem_fraction"}), True
    )
    found = solve(given, H100, load(given), MACHINE, fixed)
    for solution in found.solutions:
        assert solution.job.train.tp == 2 and solution.job.train.tokens_per_microbatch == 8192
        assert solution.job.rollout.tp == 8 and solution.job.rollout.mem_fraction == 0.5
        assert solution.job.rollout.a2a == "none"


def test_what_cannot_fit_is_left_out_and_nothing_may_be_found():
    small = Machine(10 * 10**9, 2000 * 10**9, 8, 8 * 10**9)
    job = whole("qwen2.5-7b", 8)
    assert cannot_fit(job, small, any_cache=True) and not cannot_fit(job, MACHINE, any_cache=True)
    assert solve(job, H100, load(job), small, Fixed()).solutions == ()


def test_the_command_says_which_why_and_what_others_lose(capsys):
    words = ["plan", "--solve", "--model", "moonlight-16b", "--gpus", "8", "--optimizer", "host"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for part in ("best       bound by", "next best ", "s per step  settings", "train.ep="):
        assert part in text
    assert main([*words, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    best, second = got["solutions"][:2]
    assert best["step_seconds"] <= second["step_seconds"] and best["why"] is None
    assert "more" in second["why"]
    assert main([*words, "--gpu-mem-gb", "12"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    for wrong, said in (
        (["--train", "tp=2"], "--solve: finds --train; leave them out"),
        (["--check"], "--solve, --check: give one of them"),
    ):
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "--solve"]) == 2
    assert "--solve: give CONFIG, or --model NAME --gpus N" in capsys.readouterr().err


def test_what_another_loses_is_said_by_phase():
    job = whole("qwen2.5-7b", 8, 4096)
    found = solve(job, H100, load(job), MACHINE, Fixed()).solutions
    slow = solution_of(job, found[0].ledger, H100, load(job), MACHINE)
    words = loses(slow, found[0])
    assert words.startswith(f"{slow.step_s - found[0].step_s:,.1f} s more: ")
    assert "UPDATE(actor) +" in words or "ROLLOUT +" in words
    assert "rollout." in setting_words(found[0].job) or "train." in setting_words(found[0].job)


def test_auto_is_resolved_before_a_run_and_what_is_given_is_kept(tmp_path):
    path = tiny_config(tmp_path, "qwen3_moe", train={"pp": 1}, rollout="auto")
    raw = yaml.safe_load(path.read_text())
    raw["train"] = {"auto": True, "ep": 2, "tokens_per_microbatch": 64}
    path.write_text(yaml.safe_dump(raw))
    config = load_config(path)
    assert config.train.auto and config.rollout.auto
    found, words = resolved(config, 4, 4, str(path))
    assert not found.train.auto and not found.rollout.auto
    assert (found.train.ep, found.train.tokens_per_microbatch) == (2, 64)
    assert words.startswith("layouts chosen, ") and "given: train.ep" in words
    assert resolved(found, 4, 4, str(path)) == (found, "")
    assert resolved(config, 4, 4, str(path))[0] == found
    assert main(["plan", str(path)]) == 2


def test_an_auto_section_that_nothing_fits_is_refused(tmp_path):
    path = tiny_config(tmp_path, "llama", train="auto", batch={"prompts_per_step": 3})
    config = load_config(path, ["train={auto: true, tp: 2, pp: 2}"])
    with pytest.raises(ConfigError, match=r"train: auto: no layout fits 6 ranks"):
        resolved(config, 6, 6, str(path))
