"""``rlhf plan``: what it prints and refuses; recipes fit, and a run refuses what is not built."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from rlhf.cli import main
from rlhf.config.check import check_config
from rlhf.config.faults import ConfigError
from rlhf.config.load import load_config
from rlhf.weights.find_model import find_model, known_models

ROOT = Path(__file__).parents[2]
LARGE = ROOT / "configs" / "grpo_600b.yaml"
RECIPES = [LARGE, *sorted((ROOT / "configs" / "recipes").glob("*.yaml"))]
DOC = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
QWEN = "--model qwen2.5-7b --gpus 8 --train tp=4 --rollout tp=1"
RUNS_TODAY = {
    "deepseek_v3_256",
    "moonlight_16b_8",
    "qwen2_5_7b_8",
    "qwen2_5_7b_8_ppo",
    "qwen3_30b_8",
    "smollm2_135m_1",
}
GPUS = {"smollm2_135m_1": "--gpu-mem-gb 24 --other-gb 3"}
BILLION = 1e9


def _said(capsys, command: str, words: str, status: int = 0) -> str:
    assert main([command, *shlex.split(words)]) == status
    return capsys.readouterr().out


def _plan(capsys, words: str, status: int = 0) -> dict:
    return json.loads(_said(capsys, "plan", f"{words} --json", status))


def _refused(capsys, words: str) -> str:
    assert main(["plan", *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_and_moves_the_least(capsys, path):
    got = _plan(capsys, f"{path} {GPUS.get(path.stem, '')}")
    assert got["fits"] and got["misfits"] == []
    assert got["kv_sequences_total"] >= 1
    assert (got["not_built"] == []) == (path.stem in RUNS_TODAY)
    moved = json.loads(_said(capsys, "explain", f"{path} --json"))
    assert moved["ranks"] == got["gpus"]
    assert moved["moved_bytes_total"] == moved["lower_bound_bytes"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_run_refuses_of_a_recipe_only_what_is_not_built_or_not_here(path):
    config = load_config(path)
    try:
        check_config(config, find_model(config.model.path), config.dist.ranks, "r")
        faults = []
    except ConfigError as error:
        faults = error.faults
    for fault in faults:
        assert re.search(r"not built yet|not supported yet|no such file: data/", fault), fault
    built = not any("yet" in fault for fault in faults)
    assert built == (path.stem in RUNS_TODAY)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_names_the_sources_of_its_shapes_and_layout(path):
    text = path.read_text(encoding="utf-8")
    assert f"configs/models/{load_config(path).model.path}.json" in text
    assert "Layout" in text


def test_deepseek_v3_on_128_gpus(capsys):
    """The figures that the recipe stands on: GB per GPU, and of the host of a node."""
    got = _plan(capsys, str(LARGE))
    regions, phases = got["regions"], got["phases"]
    assert got["gpus"] == 128 and got["nodes"] == 16
    assert regions["actor weights"]["mean"] / BILLION == pytest.approx(11.7, abs=0.05)
    assert regions["gradients"]["mean"] / BILLION == pytest.approx(23.5, abs=0.05)
    assert regions["engine weights"]["mean"] / BILLION == pytest.approx(33.1, abs=0.05)
    assert regions["engine derived"]["most"] / BILLION == pytest.approx(0.256, abs=0.001)
    # no two ranks of an expert: each has the whole state of its experts
    on_device = _plan(capsys, f"{LARGE} memory.optimizer=device", 1)
    assert on_device["regions"]["optimizer"]["most"] / BILLION == pytest.approx(70, rel=0.01)
    assert got["host_bytes_per_node"]["most"] / BILLION == pytest.approx(560, rel=0.01)
    windows, other = regions["windows"]["most"], regions["context, NCCL, graphs"]["most"]
    reshard = phases["RESHARD"]
    assert (reshard["mean"] - windows - other) / BILLION == pytest.approx(45, abs=0.1)
    assert (reshard["most"] - windows - other) / BILLION < 46.1
    assert got["kv_tokens_per_group"] == int(
        (56e9 - regions["engine weights"]["most"] - regions["engine derived"]["most"])
        // got["kv_token_bytes"]
    )
    assert got["kv_tokens_total"] == 16 * got["kv_tokens_per_group"] > 5_000_000
    assert got["kv_sequences_total"] == 16 * (got["kv_tokens_per_group"] // 32_768)
    text = " ".join(_said(capsys, "plan", str(LARGE)).split())
    assert f"{got['kv_tokens_total']:,} in all" in text
    assert "fits: ROLLOUT is the fullest phase" in text
    assert "not built rollout.a2a=deepep: `rlhf train`" in text


def test_seconds_of_a_step_rest_on_the_options_and_the_plan_of_the_reshard(capsys, tmp_path):
    got = _plan(capsys, QWEN)
    spent = sum(v["seconds"] for k, v in got["seconds"].items() if k != "SAVE")
    assert got["step_seconds"] == pytest.approx(spent)
    for took in got["seconds"].values():
        assert sum(took["parts"].values()) == pytest.approx(took["seconds"])
        assert took["parts"][took["bound"]] == max(took["parts"].values())
    moved = json.loads(_said(capsys, "explain", f"{QWEN.replace('gpus', 'ranks')} --json"))
    assert got["seconds"]["RESHARD"]["parts"]["wire"] == moved["predicted_s"]
    slower = _plan(capsys, f"{QWEN} --gpu-tflops 100 --gpu-hbm-gbs 1000 --nvlink-gbs 50")
    assert slower["step_seconds"] > 2 * got["step_seconds"]
    assert slower["speeds"]["peak_tflops"] == 100
    longer = _plan(capsys, f"{QWEN} --answer-tokens 1024 --prompt-tokens 700")
    assert longer["load"]["answer_tokens"] == 1024 and longer["load"]["prompt_tokens"] == 700
    path = tmp_path / "calibration.yaml"
    path.write_text(json.dumps(slower["speeds"]))
    assert _plan(capsys, f"{QWEN} --calibration {path}")["seconds"] == slower["seconds"]


def test_check_says_one_line_for_each_configuration(capsys, tmp_path):
    names = ("qwen2_5_7b_8", "qwen2_5_7b_8_ppo")
    paths = [str(ROOT / "configs" / "recipes" / f"{name}.yaml") for name in names]
    lines = _said(capsys, "plan", f"--check {' '.join(paths)}").splitlines()
    assert len(lines) == 2
    for line, path in zip(lines, paths, strict=True):
        assert re.fullmatch(
            rf"fits +{path}: qwen2.5-7b on 8, .* s per step, most in ROLLOUT.*", line
        )
    both = _said(capsys, "plan", f"--check {' '.join(paths)} --gpu-mem-gb 60", 1).splitlines()
    assert both[0].startswith("fits ")
    assert re.match(r"DOES NOT FIT .*more than the 60 there are.*; change ", both[1])
    found = json.loads(_said(capsys, "plan", f"--check {' '.join(paths)} seed=1 --json"))
    assert list(found) == paths


def test_what_is_asked_for_is_what_is_counted(capsys):
    one = _plan(capsys, QWEN)
    assert (one["gpus"], one["nodes"], one["gpu_bytes"]) == (8, 1, 80 * 10**9)
    assert one["host_bytes_per_node"]["most"] == 0
    lent = _plan(capsys, f"{QWEN} --optimizer host --gpus-per-node 4 --host-mem-gb 64")
    states = one["regions"]["optimizer"]["mean"]
    assert lent["host_bytes_per_node"]["most"] == 4 * states and lent["nodes"] == 2
    sliced = _plan(capsys, f"{QWEN} --time-slice all")
    assert "actor weights" not in sliced["phases"]["ROLLOUT"]["regions"]
    larger = _plan(capsys, f"{QWEN} --other-gb 9 --window-mib 1024")
    assert larger["regions"]["windows"]["most"] == 2 * 2**30
    assert larger["regions"]["context, NCCL, graphs"]["least"] == 9 * 10**9


def test_sums_of_phases_are_of_the_regions_that_they_name(capsys):
    got = _plan(capsys, f"{ROOT}/configs/recipes/qwen2_5_7b_8_ppo.yaml")
    for phase in got["phases"].values():
        total = sum(got["regions"][name]["most"] for name in phase["regions"])
        assert phase["most"] == total  # all ranks are alike without stages
        assert phase["least"] <= phase["mean"] <= phase["most"] <= got["peak_bytes"]


def test_a_checkpoint_has_the_critic_too(capsys):
    ppo = _plan(capsys, f"{ROOT}/configs/recipes/qwen2_5_7b_8_ppo.yaml")
    grpo = _plan(capsys, f"{ROOT}/configs/recipes/qwen2_5_7b_8.yaml")
    assert ppo["state_bytes"] == 2 * grpo["state_bytes"]
    assert ppo["export_bytes"] == grpo["export_bytes"]


def test_what_does_not_fit_ends_with_1_and_a_change_that_would(capsys):
    text = _said(capsys, "plan", f"{QWEN} --gpu-mem-gb 32", 1)
    assert "does not fit:\n  ROLLOUT on rank 0 needs" in text
    assert "more than the 32 there are: engine weights" in text
    words = re.search(r"change +(memory\.\S+)", text)
    assert words
    assert "that was tried fits" in _said(capsys, "plan", f"{QWEN} --gpu-mem-gb 9", 1)


def test_kimi_engines_of_16_need_fp8_or_more_ranks(capsys):
    """As published for fp8 weights; in bf16 an engine's rank would hold 138 GB."""
    path = ROOT / "configs" / "recipes" / "kimi_k2_256.yaml"
    got = _plan(capsys, f"{path} rollout.tp=16 rollout.ep=16 rollout.a2a=none", 1)
    assert got["regions"]["engine weights"]["most"] / BILLION == pytest.approx(137.7, abs=0.1)
    assert got["change"] == "rollout.tp=64, rollout.ep=64, rollout.dp=32"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "rlhf plan CONFIG, or rlhf plan --model NAME"),
        ("--model moonlight-16b", "needs --gpus, --train, --rollout too"),
        (f"{QWEN} --gpu-mem-gb 0", "--gpu-mem-gb: must be above 0 and below 1e+09 GB, is 0"),
        (f"{QWEN} --host-mem-gb -1", "--host-mem-gb: must be above 0 and below 1e+09 GB, is -1"),
        (f"{QWEN} --gpu-mem-gb inf", "--gpu-mem-gb: must be above 0 and below 1e+09 GB, is inf"),
        (f"{QWEN} --host-mem-gb 1e300", "and below 1e+09 GB, is 1e+300"),
        (f"{QWEN} --gpus 0", "--gpus: must be at least 1, is 0"),
        (f"{QWEN} --gpus 1000000", "--gpus: must be at most 16384, is 1000000"),
        (f"{QWEN} --gpus-per-node 0", "--gpus-per-node: must be at least 1, is 0"),
        (f"{QWEN} --train tp=3 --gpus 6", "train.tp: 3 must divide the model's attention"),
        (f"{LARGE} --model kimi-k2-1t", "says model and layouts; leave out --model"),
        (f"{LARGE} --optimizer device", "write memory.optimizer=device behind it"),
        (f"{LARGE} memory.optimizer=disk", "memory.optimizer"),
        (f"{LARGE} model.path=deepseek", "did you mean deepseek-v3-671b"),
        (f"{LARGE} --gpus 100", "must be a multiple"),
        (f"{LARGE} --gpus-per-node 6", "rollout.tp*rollout.pp=64 and the 6 ranks of a node"),
        ("nowhere.yaml", "nowhere.yaml: no such file"),
        ("--check", "--check: needs CONFIG, one or more"),
        (f"{QWEN} --nic-gbs 0", "--nic-gbs: must be above 0 and below 1e+09, is 0"),
        (f"{QWEN} --gpu-tflops nan", "--gpu-tflops: must be above 0 and below 1e+09, is nan"),
        (f"{QWEN} --calibration nowhere.yaml", "nowhere.yaml: cannot be read"),
        (f"{QWEN} --answer-tokens 5000", "at most the longest answer of 1024, is 5000"),
        (f"{QWEN} --prompt-tokens -1", "prompt_tokens: must be at least 0, is -1"),
        (f"{QWEN} --prompt-tokens 1025", "at most data.max_prompt_tokens=1024, is 1025"),
        ("--model= --gpus 8 --train tp=1 --rollout tp=1", "name must not be empty"),
        (f"{QWEN} --calibration=", "the calibration file's name must not be empty"),
        ("--solve --model qwen2.5-7b --gpus 8 --window-mib 9", "--solve: say the window in CONFIG"),
        ("runs/x --compare --gpus 8", "nothing else, but --json; leave out --gpus"),
        ("runs/x --compare --gpu-mem-gb 40 --solve", "leave out --solve, --gpu-mem-gb"),
        ("--solve --model qwen2.5-7b --gpus 0", "--gpus: must be at least 1, is 0"),
        (f"--solve {LARGE} --gpus-per-node 0", "--gpus-per-node: must be at least 1, is 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_each(capsys, words, expected):
    assert expected in _refused(capsys, words)


def test_a_critic_of_another_model_is_counted_by_its_own_shapes(capsys, tmp_path):
    raw = json.loads(known_models()["qwen2.5-7b"].read_text())
    raw |= {"architectures": ["Qwen2ForSequenceClassification"], "num_hidden_layers": 14}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    path = ROOT / "configs" / "recipes" / "qwen2_5_7b_8_ppo.yaml"
    whole = _plan(capsys, str(path))["regions"]["critic weights"]["most"]
    half = _plan(capsys, f"{path} critic.path={tmp_path}")["regions"]["critic weights"]["most"]
    embedding = 152064 // 4 * 3584 * 2
    assert half - embedding == pytest.approx((whole - embedding) / 2, rel=1e-3)


def test_the_example_of_the_docs_prints_what_it_shows(capsys):
    command, shown = re.search(r"\n    (rlhf plan.*?)\n\n(.*?)\n\n[^ \n]", DOC, re.S).groups()
    printed = _said(
        capsys, "plan", command.removeprefix("rlhf plan ").replace("configs", f"{ROOT}/configs")
    )
    lines = [line.removeprefix("    ").rstrip() for line in shown.splitlines()]
    assert lines == [line.rstrip() for line in printed.rstrip().splitlines()]
