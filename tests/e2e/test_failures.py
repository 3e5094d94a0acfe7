"""What goes wrong ends all ranks together, soon, with one line that names rank, phase and cause."""

import os
import re
import signal
import time

import psutil
import pytest

from tests.helpers.runs import finish, read_metrics, rlhf, start, tiny_config, wait_for

LIMIT_S = 30
LINE = re.compile(r"^stopped: rank (\d+), phase (\S+), step (-?\d+): (.*)$", re.MULTILINE)

LOOPS = '''
import os

import rlhf.loop


def rank_raises(run):
    """The usual loop, but rank 1 has a fault in step 1."""
    take = run.actor.logprobs

    def logprobs(batch, step):
        if step == 1 and run.ground.plan.world.rank == 1:
            raise ArithmeticError("planted fault")
        return take(batch, step)

    run.actor.logprobs = logprobs
    rlhf.loop.train(run)


def rank_dies(run):
    """Rank 1 is gone without a word in step 1."""
    take = run.actor.logprobs

    def logprobs(batch, step):
        if step == 1 and run.ground.plan.world.rank == 1:
            os.kill(os.getpid(), 9)
        return take(batch, step)

    run.actor.logprobs = logprobs
    rlhf.loop.train(run)
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    (folder / "loops.py").write_text(LOOPS, encoding="utf-8")
    return tiny_config(folder, num_steps=400, data={"eval": []})


def run_dir(config):
    return config.parent / "run"


def started(config, *arguments):
    """A running job that has logged a step; a fresh run folder."""
    name = f"run_dir={config.parent / 'run'}"
    journal = run_dir(config) / "metrics.jsonl"
    journal.unlink(missing_ok=True)
    process = start("train", str(config), name, "checkpoint.resume=never", *arguments)
    wait_for(
        lambda: process.poll() is not None or (journal.exists() and read_metrics(run_dir(config))),
        120,
        "the first step",
    )
    return process


def left_over(pids):
    """Processes of the job that still run."""
    return [p for p in pids if psutil.pid_exists(p) and _alive(p)]


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(process):
    return {p.pid: p.name() for p in psutil.Process(process.pid).children(recursive=True)}


def ended(process, pids, status):
    """(line, seconds): ended in time with this status, one line, and nothing left behind."""
    began = time.monotonic()
    code, _, err = finish(process, LIMIT_S + 10)
    seconds = time.monotonic() - began
    assert seconds < LIMIT_S, err
    assert code == status, err
    wait_for(lambda: not left_over(pids), 10, f"end of {pids}")
    lines = LINE.findall(err)
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_engine_process_ends_the_run_with_its_name(config, victim):
    process = started(config)
    pids = family(process)
    target = next(pid for pid, name in pids.items() if victim[:8] in name)
    os.kill(target, signal.SIGKILL)
    rank, _, _, cause = ended(process, pids, 1)
    assert rank in "01"
    assert "EngineDied" in cause
    assert victim in cause


def test_a_rank_that_raises_ends_all_with_its_cause(config):
    process = start(
        "train",
        str(config),
        "checkpoint.resume=never",
        "--loop",
        f"{config.parent}/loops.py:rank_raises",
    )
    code, _, err = finish(process, 120)
    assert code == 1, err
    assert LINE.findall(err) == [
        (
            "1",
            "pack",
            "1",
            f"ArithmeticError: planted fault (traceback: {run_dir(config)}/errors/rank1.txt)",
        )
    ]
    assert "planted fault" in (run_dir(config) / "errors" / "rank1.txt").read_text()


def test_a_rank_that_vanishes_ends_the_others(config):
    process = start(
        "train",
        str(config),
        "checkpoint.resume=never",
        "--loop",
        f"{config.parent}/loops.py:rank_dies",
    )
    code, _, err = finish(process, 120)
    assert code == 1, err
    assert [line[0] for line in LINE.findall(err)] in (["0"], [])


def test_ctrl_c_saves_and_leaves_nothing(config):
    process = started(config)
    pids = family(process)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process, LIMIT_S)
    assert code == 75, err
    assert "SIGINT" in err
    assert "steps are saved in" in err
    assert not LINE.findall(err)
    wait_for(lambda: not left_over(pids), 10, f"end of {pids}")


def test_what_the_user_got_wrong_is_refused_before_anything_starts(config):
    status, out, err = rlhf("train", str(config), "train.tp=3", "model.pth=x", limit_s=60)
    assert status == 2
    assert "model.pth" in err
    assert "did you mean" in err
    assert "Traceback" not in out + err
    status, _, err = rlhf(
        "train", str(config), "train.pp=1", "train.tp=4", "dist.ranks=4", limit_s=60
    )
    assert status == 2
    assert re.search(r"train\.tp.*4.*2", err), err
    status, _, err = rlhf("train", str(config), "model.path=/nowhere", limit_s=60)
    assert status == 2
    assert "/nowhere" in err
