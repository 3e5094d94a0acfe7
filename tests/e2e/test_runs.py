"""Whole runs as a user starts them: no gap, resumed runs repeat, exports answer alike."""

import json
import re
import signal
from fnmatch import fnmatch

import pytest
import torch

from rlhf.track.accounts import ACCOUNTS, added, read_accounts
from tests.helpers.runs import ROOT, finish, read_metrics, rlhf, start, tiny_config, wait_for

NOT_REPEATED = (
    "seconds/",
    "share/",
    "memory_gib/",
    "memory/",
    "tokens_per_s/",
    "time",
    "reshard/verify_s",
)


def numbers(run_dir):
    """Metrics that must repeat: all but times and memory, and lines of nothing else."""
    lines = [
        {k: v for k, v in line.items() if not k.startswith(NOT_REPEATED)}
        for line in read_metrics(run_dir)
    ]
    return [line for line in lines if set(line) != {"steps_done"}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run of 4 steps with two updates each: PP2 training, two engines."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(
        folder,
        num_steps=4,
        batch={"updates_per_step": 2},
        checkpoint={"every": 2, "export_hf": True},
        track={"console": True},
    )
    status, out, err = rlhf("train", str(config))
    assert status == 0, err
    return folder, out


def test_every_step_is_logged_and_engine_and_trainer_agree(whole):
    folder, out = whole
    steps = [line for line in read_metrics(folder / "run") if "reward/mean" in line]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert all(0 <= line["gap/mean_abs"] <= 1e-5 for line in steps)
    assert any(line["optim/grad_norm"] > 0 for line in steps)
    assert out.strip().splitlines()[-1].startswith("accuracy ")


def test_no_second_of_saving_and_evaluating_is_lost_or_counted_with_another_step(whole):
    folder, out = whole
    lines = read_metrics(folder / "run")
    between = [
        (line["steps_done"], name)
        for line in lines
        if "steps_done" in line
        for name in line
        if name.startswith("seconds/")
    ]
    assert between == [
        (0, "seconds/eval"),
        (2, "seconds/save"),
        (4, "seconds/save"),
        (4, "seconds/eval"),
        (4, "seconds/save_export"),
    ]
    steps = [line for line in lines if "step" in line]
    assert not {name for line in steps for name in line} & {name for _, name in between}
    table = out[out.index("s / step") :]
    assert all(re.search(rf"\b{name}\b", table) for name in ("eval", "save", "save_export"))


def test_every_second_of_every_rank_has_a_cause(whole):
    """Against the seconds that the recorder measures by itself."""
    folder, _ = whole
    lines = read_accounts(folder / "run" / ACCOUNTS)
    assert [line.num_steps for line in lines] == [1, 1, 1, 1, 0]
    for line in lines:
        assert len(line.wall_s) == 2
        for rank, wall_s in enumerate(line.wall_s):
            parts = [seconds[rank] for seconds in line.causes.values()]
            assert sum(parts) == pytest.approx(wall_s, rel=0.01)
            assert min(parts) > -1e-3, line.causes
    metrics = read_metrics(folder / "run")
    told = sum(m.get("seconds/step", 0.0) for m in metrics)
    told += sum(v for m in metrics if "step" not in m for k, v in m.items() if "seconds/" in k)
    whole_run = added(lines)
    assert max(whole_run.wall_s) == pytest.approx(told, rel=0.05)
    assert {
        *("decode", "pack", "score", "train", "pipeline", "reshard_pack", "reshard_wire"),
        *("reshard_write", "reshard_verify", "save", "eval", "switch", "peers", "other"),
    } <= set(whole_run.causes)
    for metric in metrics:
        if "step" in metric:
            shares = [v for k, v in metric.items() if k.startswith("share/")]
            assert sum(shares) == pytest.approx(1, abs=0.01)
    assert whole_run.shares()["share/other"] < 0.1


def test_the_report_of_a_run_shows_causes_and_results(whole):
    folder, _ = whole
    status, out, _ = rlhf("report", str(folder / "run"))
    assert status == 0
    assert all(word in out for word in ("pipeline", "worst rank", "accuracy", "reshard_wire"))
    status, out, _ = rlhf("report", str(folder / "run"), "--json")
    assert json.loads(out)["steps"] == 4
    status, _, err = rlhf("report", str(folder))
    assert status == 2
    assert "accounting.jsonl: no such file; give the folder of a run" in err


def test_a_run_keeps_its_plan_and_is_compared_with_it(whole):
    """Bytes are counted, so they are equal; seconds are as good as the constants are."""
    folder, _ = whole
    run = folder / "run"
    status, out, err = rlhf("plan", str(run), "--compare", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert {"rollout", "pack", "score_actor", "update_actor", "reshard", "switch", "save"} == set(
        found["seconds"]
    )
    for name in ("reshard/sent_bytes", "reshard/local_bytes"):
        assert found["bytes"][name]["predicted"] == found["bytes"][name]["measured"] > 0
    assert set(found["memory_gib"]) >= {"rollout", "update_actor"}
    status, out, _ = rlhf("plan", str(run), "--compare")
    assert status == 0
    assert re.search(r"^largest gap  \w+: .* s measured", out, re.MULTILINE)
    assert re.search(r"^change       \w+", out, re.MULTILINE)
    status, _, err = rlhf("plan", str(run), "train.pp=2", "--compare")
    assert (status, err.strip()) == (
        2,
        "--compare: give the folder of one run and nothing else, but --json",
    )


def test_a_calibration_that_is_not_there_is_refused_before_a_rank_starts(tmp_path):
    config = tiny_config(tmp_path, track={"calibration": "none.yaml"})
    status, _, err = rlhf("train", str(config))
    assert status == 2
    assert "none.yaml: cannot be read" in err


def test_every_metric_is_in_the_documentation(whole):
    folder, _ = whole
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    described = re.findall(r"`([a-z_0-9/*]+)`", text)
    for name in {name for line in read_metrics(folder / "run") for name in line}:
        assert any(fnmatch(name, pattern) for pattern in described), name


def test_the_run_folder_holds_what_the_readme_promises(whole):
    folder, _ = whole
    run = folder / "run"
    assert {
        "config.yaml",
        "metrics.jsonl",
        "accounting.jsonl",
        "curves.png",
        "samples",
        "checkpoints",
        "hf",
    } <= {p.name for p in run.iterdir()}
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004",
    ]


def assert_export_answers_as_the_engine(run, steps_done):
    """Greedy answers of transformers with the exported weights = the evaluation's samples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    samples = (run / "samples" / f"eval-{steps_done:06d}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in samples.splitlines()]
    assert rows
    stop = tokenizer.convert_tokens_to_ids(">")
    for row in rows:
        prompt = torch.tensor([tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            out = model.generate(
                prompt, max_new_tokens=6, do_sample=False, eos_token_id=[2, stop], pad_token_id=0
            )
        answer = [t for t in out[0, prompt.shape[1] :].tolist() if t not in (2, stop)]
        assert tokenizer.decode(answer) == row["answer"]


def test_the_export_answers_as_the_engine_did(whole):
    folder, _ = whole
    assert_export_answers_as_the_engine(folder / "run", 4)


def test_a_stopped_and_resumed_run_repeats_the_whole_one(whole, tmp_path):
    """TERM in mid-run: saved, and the same command goes on; metrics equal bit for bit."""
    folder, _ = whole
    config = tiny_config(
        tmp_path,
        num_steps=4,
        batch={"updates_per_step": 2},
        checkpoint={"every": 2},
    )
    run = tmp_path / "run"
    first = start("train", str(config))
    wait_for(
        lambda: (
            (run / "metrics.jsonl").exists()
            and any("reward/mean" in line for line in read_metrics(run))
        ),
        120,
        "the first step",
    )
    first.send_signal(signal.SIGTERM)
    status, _, err = finish(first)
    assert status == 75, err
    assert "steps are saved in" in err
    assert len([x for x in read_metrics(run) if "reward/mean" in x]) < 4
    status, out, err = rlhf("train", str(config))
    assert (status, err) == (0, ""), "nor does loading a checkpoint warn"
    assert out == "", "track.console is off"
    assert numbers(run) == numbers(folder / "run")


LAYOUTS = {
    "llama tp2+sp, engine tp2": (
        "llama",
        {"tp": 2, "pp": 1, "sequence_parallel": True},
        {"tp": 2},
        {},
    ),
    "qwen2 tied pp2, engine tp2, kl in loss": (
        "qwen2",
        {"pp": 2},
        {"tp": 2},
        {"kl": {"place": "loss", "coef": 0.05}},
    ),
    "qwen2 tied tp2, two engines": ("qwen2", {"tp": 2, "pp": 1}, {}, {}),
    "qwen3 tp2, engine pp2": ("qwen3", {"tp": 2, "pp": 1}, {"pp": 2}, {}),
    "qwen3 pp2, engine dp2": ("qwen3", {"pp": 2}, {"tp": 2, "dp": 2}, {}),
    "qwen2 tied cp2, two engines": ("qwen2", {"cp": 2, "pp": 1}, {}, {}),
    "qwen3 dp2, two engines, kl in reward": (
        "qwen3",
        {"pp": 1},
        {},
        {"kl": {"place": "reward", "estimator": "k1", "coef": 0.05}},
    ),
    "deepseek_v3 ep2, engine tp2 ep2": ("deepseek_v3", {"pp": 1, "ep": 2}, {"tp": 2, "ep": 2}, {}),
    "qwen3_moe tp2+sp ep2 etp1, two engines": (
        "qwen3_moe",
        {"tp": 2, "pp": 1, "sequence_parallel": True, "ep": 2, "etp": 1},
        {},
        {},
    ),
    "glm4_moe pp2, engine ep2 dp2": ("glm4_moe", {"pp": 2}, {"tp": 2, "ep": 2, "dp": 2}, {}),
    "moonlight tp2+sp, engine tp2": (
        "moonlight",
        {"tp": 2, "pp": 1, "sequence_parallel": True},
        {"tp": 2},
        {},
    ),
}
SLOW = ("qwen3 pp2, engine dp2", "deepseek_v3", "qwen3_moe", "glm4_moe", "moonlight")
"""For ``make test-full``: what the others also show, one by one."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n.startswith(SLOW) else []) for n in LAYOUTS],
)
def test_engine_trainer_and_transformers_agree_after_updates_and_reshards(name, tmp_path):
    family, train, rollout, algorithm = LAYOUTS[name]
    config = tiny_config(
        tmp_path,
        family,
        num_steps=4,
        train=train,
        rollout=rollout,
        algorithm=algorithm,
        checkpoint={"export_hf": True},
    )
    status, _, err = rlhf("train", str(config))
    assert status == 0, err
    steps = [line for line in read_metrics(tmp_path / "run") if "reward/mean" in line]
    assert len(steps) == 4
    assert all(line["gap/mean_abs"] <= 1e-5 for line in steps), steps
    assert sum(line.get("optim/grad_norm", 0) > 0 for line in steps) >= 3
    assert_export_answers_as_the_engine(tmp_path / "run", 4)
