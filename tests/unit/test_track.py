"""The journal holds each step once, and no sink can kill or stall what feeds it."""

from __future__ import annotations

import io
import json
import logging
import math
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlhf.config.schema import TrackSection
from rlhf.track.curves import draw_curves, phase_totals, seconds_by_step, smoothed
from rlhf.track.journal import History, Journal, read_journal
from rlhf.track.metrics import Max, Mean, Metric, Sum, merge, values
from rlhf.track.report import accuracy_line, finish
from rlhf.track.sinks.console import ConsoleSink, clock
from rlhf.track.sinks.sink import Background
from rlhf.track.sinks.tensorboard import markdown_table
from rlhf.track.tracker import Tracker


@dataclass
class Row:
    prompt: str = "a | b\n"
    answer: str = "5"
    expected: str = "5"
    value: float = 1.0


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 * step,
        "rollout/entropy": 1.0,
        "optim/grad_norm": 2.0,
        "gap/mean_abs": 1e-6,
        "gap/p99": 1e-5,
        "seconds/rollout": 2.0,
        "seconds/update_actor": 1.0,
        "seconds/step": 3.5,
        "tokens_per_s/rollout": 100.0,
    }


def quiet(**changes) -> TrackSection:
    return TrackSection.model_validate({"console": False, **changes})


# --- metrics -------------------------------------------------------------------------------------


def test_a_mean_of_unequal_parts_is_not_the_mean_of_means():
    assert merge([{"x": Mean(4.0, 4)}, {"x": Mean(1.0, 1)}])["x"] == Mean(3.4, 5)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_merging_parts_equals_the_whole(parts):
    def metrics(numbers: list[float]) -> dict[str, Metric]:
        mean = sum(numbers) / len(numbers) if numbers else 0.0
        out: dict[str, Metric] = {"mean": Mean(mean, len(numbers)), "sum": Sum(sum(numbers))}
        return out | ({"max": Max(max(numbers))} if numbers else {})

    whole = [x for part in parts for x in part]
    merged = values(merge(metrics(part) for part in parts))
    expected = values(metrics(whole)) if parts else {}
    assert merged == pytest.approx(expected, abs=1e-6)


def test_what_is_not_finite_stays_visible_and_kinds_do_not_mix():
    assert math.isnan(values(merge([{"x": Max(1.0)}, {"x": Max(math.nan)}]))["x"])
    assert math.isnan(values(merge([{"x": Mean(math.nan, 1)}, {"x": Mean(1.0, 1)}]))["x"])
    assert values({"x": Mean(0.0, 0.0)}) == {}
    with pytest.raises(TypeError, match="x is a Mean and a Max"):
        merge([{"x": Mean(1.0)}, {"x": Max(1.0)}])


# --- journal -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2, 4, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 4, "reward'])
def test_a_resumed_run_has_each_step_once(tmp_path, first, torn):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    for step in range(4):
        journal.write_between(step, {"eval/accuracy": 0.5})
        journal.write_step(step, {"x": math.inf})
    journal.close()
    with path.open("a") as f:
        f.write(torn)
    resumed = Journal(path, first)
    for step in range(min(first, 4), 6):
        resumed.write_step(step, {"x": 1.0})
    resumed.close()
    history = read_journal(path)
    assert [r["step"] for r in history.steps] == list(range(6))
    assert [r["steps_done"] for r in history.between] == list(range(min(first, 4)))
    assert [r["x"] for r in history.steps] == [None] * min(first, 4) + [1.0] * (6 - min(first, 4))
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_journal_that_cannot_be_written_is_named(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/metrics\.jsonl'"):
            journal.write_step(0, {"x" * 100: 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- sinks ---------------------------------------------------------------------------------------


class Recording:
    """A sink that keeps what it got, and does ``on_step`` first."""

    def __init__(self, on_step=lambda step: None):
        self.got, self.closed, self.on_step = [], False, on_step

    def step(self, step, metrics):
        self.on_step(step)
        self.got.append(step)

    def between(self, steps_done, metrics):
        self.got.append(("eval", steps_done))

    def samples(self, title, rows):
        self.got.append(title)

    def close(self):
        self.closed = True


def soon() -> float:
    return time.monotonic() + 10


def post_steps(sink: Background, steps: range) -> None:
    for step in steps:
        sink.post(lambda s, step=step: s.step(step, {}))


def test_a_sink_gets_everything_in_order_and_is_closed():
    recording = Recording()
    background = Background("x", lambda: recording)
    post_steps(background, range(20))
    background.close(soon())
    assert recording.got == list(range(20))
    assert recording.closed


@pytest.mark.parametrize("where", ["creation", "step", "exit"])
def test_a_sink_that_raises_is_reported_once_and_left_out(where, caplog):
    def fail(step: int) -> None:
        if where == "exit":
            raise SystemExit(3)
        raise OSError("no room")

    def make() -> Recording:
        if where == "creation":
            fail(0)
        return Recording(fail)

    with caplog.at_level(logging.WARNING):
        background = Background("x", make, capacity=2)
        post_steps(background, range(20))
        background.close(soon())
        post_steps(background, range(20))
        background.close(soon())
    off = [r.getMessage() for r in caplog.records if "off for the rest" in r.getMessage()]
    assert len(off) == 1
    assert "x is off" in off[0]


def test_a_sink_that_blocks_stalls_nobody(caplog):
    release = threading.Event()
    recording = Recording(lambda step: release.wait())
    background = Background("slow", lambda: recording, capacity=4)
    post_steps(background, range(100))
    assert background.dropped >= 95
    with caplog.at_level(logging.WARNING):
        background.close(time.monotonic())
    assert "slow did not finish in time" in caplog.text
    assert f"{background.dropped} entries are missing" in caplog.text
    release.set()


# --- tracker -------------------------------------------------------------------------------------


def test_only_the_writer_writes(tmp_path):
    tracker = Tracker(tmp_path / "run", quiet(tensorboard=True), 3, is_writer=False)
    tracker.start(0)
    tracker.log(0, step_metrics(0))
    tracker.log_between(0, {"eval/accuracy": 1.0})
    tracker.samples("step-0", [Row()])
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def run(folder: Path, section: TrackSection, steps: range = range(3)) -> None:
    tracker = Tracker(folder, section, 3, is_writer=True, config={"lr": 1e-6})
    tracker.start(steps.start)
    for step in steps:
        tracker.log_between(step, {"eval/accuracy": 0.5 + 0.1 * step, "eval/items": 64.0})
        tracker.log(step, step_metrics(step))
        tracker.samples(f"step-{step:06d}", [Row()])
    tracker.close()
    tracker.close()


def test_journal_samples_and_tensorboard_of_a_run(tmp_path):
    run(tmp_path, quiet(tensorboard=True))
    run(tmp_path, quiet(tensorboard=True), range(2, 3))
    history = read_journal(tmp_path / "metrics.jsonl")
    assert [{**r} for r in history.steps] == [{"step": s, **step_metrics(s)} for s in range(3)]
    assert json.loads((tmp_path / "samples" / "step-000002.jsonl").read_text()) == {
        "prompt": "a | b\n",
        "answer": "5",
        "expected": "5",
        "value": 1.0,
    }
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2


@pytest.mark.parametrize("mode", ["offline", "cloud"])
def test_swanlab_offline_and_cloud_without_a_login(tmp_path, mode, caplog, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    with caplog.at_level(logging.WARNING):
        run(tmp_path / mode, quiet(swanlab=mode))
    assert "off for the rest" not in caplog.text
    assert ("cannot be used" in caplog.text) == (mode == "cloud")
    assert list((tmp_path / mode / "swanlab").glob("run-*/*.swanlab"))


def test_a_sink_that_is_not_installed_costs_only_itself(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        run(tmp_path, quiet(wandb="offline"))
    assert "wandb is off for the rest of the run" in caplog.text
    assert len(read_journal(tmp_path / "metrics.jsonl").steps) == 3


def test_a_large_gap_warns(tmp_path, caplog):
    tracker = Tracker(tmp_path, quiet(gap_alarm=0.1), 3, is_writer=True)
    tracker.start(0)
    with caplog.at_level(logging.WARNING):
        tracker.log(0, {"gap/mean_abs": 0.09})
        assert not caplog.text
        tracker.log(1, {"gap/mean_abs": 0.2})
    tracker.close()
    assert "differ by 0.2 on average, more than track.gap_alarm=0.1" in caplog.text


def test_a_resumed_run_keeps_what_it_does_not_repeat(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl", 0)
    for done in (2, 4):
        journal.write_between(done, {"seconds/save": 1.0})
        journal.write_between(done, {"eval/accuracy": 0.5})
    journal.close()
    Journal(tmp_path / "metrics.jsonl", 2).close()
    assert read_journal(tmp_path / "metrics.jsonl").between == [
        {"steps_done": 2, "seconds/save": 1.0}
    ]


def test_seconds_between_steps_belong_to_the_step_before(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl", 0)
    journal.write_between(2, {"seconds/eval": 1.0})
    for step in (2, 3):
        journal.write_step(step, {"seconds/rollout": 2.0, "seconds/step": 2.0})
        journal.write_between(step + 1, {"seconds/eval": 4.0})
    journal.write_between(4, {"seconds/save_export": 8.0})
    journal.close()
    history = read_journal(tmp_path / "metrics.jsonl")
    assert seconds_by_step(history) == {
        2: {"rollout": 2.0, "eval": 5.0},
        3: {"rollout": 2.0, "eval": 4.0, "save_export": 8.0},
    }
    assert phase_totals(history) == {"rollout": 4.0, "eval": 9.0, "save_export": 8.0}


# --- what people read ----------------------------------------------------------------------------


def test_a_log_gets_one_plain_line_per_step():
    out = io.StringIO()
    sink = ConsoleSink(3, 0, Console(file=out, width=60))
    sink.between(0, {"eval/accuracy": 0.5})
    for step in range(2):
        sink.step(step, step_metrics(step))
    sink.close()
    assert out.getvalue().splitlines() == [
        "held-out accuracy after 0 steps: 0.500",
        "step 1/3  reward 0.00  entropy 1.00  grad 2  gap 1.0e-06  "
        "3.5 s (rollout 2.0, update_actor 1.0)  7 s left",
        "step 2/3  reward 0.10  entropy 1.00  grad 2  gap 1.0e-06  "
        "3.5 s (rollout 2.0, update_actor 1.0)  4 s left",
    ]


def test_a_terminal_gets_a_bar_with_reward_and_time_left():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    sink = ConsoleSink(3, 0, console)
    sink.between(0, {"eval/accuracy": 0.5})
    for step in range(2):
        sink.step(step, step_metrics(step))
    running = out.getvalue()
    sink.close()
    assert "2/3" in out.getvalue()
    assert "reward 0.10  held-out 0.50  4 s left" in out.getvalue()
    # the cursor is shown all the time: a process that is ended leaves the terminal usable
    assert running.rindex("\x1b[?25h") > running.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (65, "1:05 min"), (7380, "2:03 h")]
)
def test_durations_are_readable(seconds, text):
    assert clock(seconds) == text


def test_the_report_ends_with_the_accuracy_line_and_draws_the_curves(tmp_path):
    run(tmp_path, quiet())
    out = io.StringIO()
    finish(tmp_path, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[-1] == "accuracy 0.50 -> 0.70 (held-out, greedy, 64 items)"
    assert any("rollout" in line and "67%" in line and "2.00" in line for line in lines)
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_answers_and_evaluations_share_an_axis(tmp_path):
    """The reward of step s is of the weights after s steps, as is an evaluation at s."""
    history = History(
        [{"step": s, "reward/mean": 0.1 * s, "seconds/rollout": 1.0} for s in range(3)],
        [{"steps_done": 3, "eval/accuracy": 0.3}],
    )
    draw_curves(history, tmp_path / "curves.svg", "run")
    text = (tmp_path / "curves.svg").read_text()
    assert text.count("<!-- steps done -->") == 3
    assert text.count("<!-- step -->") == 1


def test_a_run_that_did_nothing_has_a_quiet_report(tmp_path):
    Journal(tmp_path / "metrics.jsonl", 0).close()
    finish(tmp_path, Console(file=(out := io.StringIO())))
    assert out.getvalue() == ""
    assert accuracy_line(read_journal(tmp_path / "metrics.jsonl")) is None


@given(st.lists(st.floats(-1, 1), min_size=1))
def test_smoothing_keeps_the_ends_and_the_range(numbers):
    out = smoothed(numbers)
    assert (out[0], out[-1]) == (numbers[0], numbers[-1])
    assert min(numbers) - 1e-9 <= min(out)
    assert max(out) <= max(numbers) + 1e-9


def test_tables_of_samples_have_one_line_per_sample():
    assert markdown_table([Row(), Row()]).splitlines()[2] == "| a \\| b\\n | 5 | 5 | 1 |"
