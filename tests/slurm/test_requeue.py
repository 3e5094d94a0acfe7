"""A job that is asked to stop, or loses a node, comes back by itself and repeats the whole run."""

from pathlib import Path

import pytest

from tests.helpers.runs import read_metrics, rlhf, tiny_config, wait_for
from tests.slurm.test_jobs import assert_same_numbers

NUM_STEPS = 5
STEP_LIMIT_S = 180
REWARD = """
import itertools, time
from pathlib import Path

calls = itertools.count()


def share_of_letters(prompt, text, trajectory):
    # three steps of eight answers to this rank's prompts; then wait for the test
    if next(calls) >= 24:
        while not Path({released!r}).exists():
            time.sleep(0.05)
    return sum(c.islower() for c in text) / 6
"""


def held_config(folder):
    """A run that stays in the rollout of step 3 until ``released`` is there."""
    config = tiny_config(
        folder,
        num_steps=NUM_STEPS,
        checkpoint={"every": 1},
        data={"eval": [], "reward_timeout_s": 300},
        dist={"silence_s": 10, "timeout_s": 60},
    )
    reward = REWARD.format(released=str(folder / "released"))
    (folder / "reward.py").write_text(reward, encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = held_config(folder)
    (folder / "released").touch()
    status, _, err = rlhf("train", str(config))
    assert status == 0, err
    return folder / "run"


def submit_held(cluster, folder, **variables):
    """A job on two nodes that has done three steps."""
    job = cluster.submit(held_config(folder), 2, **variables)
    wait_for(lambda: job.facts()["JobState"] != "PENDING", 60, "the start")
    run = folder / "run"

    def three_steps():
        assert job.facts()["JobState"] == "RUNNING", job.output()
        held = Path(run, "metrics.jsonl").exists() and len(read_metrics(run)) >= 3
        return held and "phase rollout, step 3" in job.output()

    wait_for(three_steps, STEP_LIMIT_S, "three steps")
    return job


@pytest.mark.parametrize("starter", ["node", pytest.param("rank", marks=pytest.mark.slow)])
def test_usr1_saves_and_the_job_goes_on_by_itself(cluster, undisturbed, tmp_path, starter):
    job = submit_held(cluster, tmp_path, STARTER=starter)
    job.signal("USR1")
    wait_for(lambda: "asked to stop by USR1" in job.output(), 60, "the signal")
    (tmp_path / "released").touch()
    facts = job.ends_well()
    assert facts["Restarts"] == "1"
    log = job.log.read_text(encoding="utf-8")
    assert "stopped: SIGUSR1 at the edge of phase" in log
    assert "stopped and saved: requeued" in log
    assert_same_numbers(tmp_path / "run", undisturbed)


def test_a_killed_node_costs_what_followed_the_newest_checkpoint(cluster, undisturbed, tmp_path):
    """Four nodes, two in use: the job comes back on those that are left."""
    job = submit_held(cluster, tmp_path, MAX_RESTARTS="3")
    victim = cluster.hosts(job.facts()["NodeList"])[1]
    cluster.control("kill-node", victim)
    (tmp_path / "released").touch()
    try:
        facts = job.ends_well()
    finally:
        cluster.control("start-node", victim)
    assert int(facts["Restarts"]) >= 1
    assert victim not in cluster.hosts(facts["NodeList"])
    assert_same_numbers(tmp_path / "run", undisturbed)


def test_a_cancelled_job_saves_and_does_not_come_back(cluster, tmp_path):
    """scancel ends what Slurm still runs after KillWait; a step of a second is saved before."""
    job = submit_held(cluster, tmp_path)
    cluster.run("scancel", str(job.number))
    job.wait("CANCELLED")
    assert job.facts()["Restarts"] == "0"
    assert "requeued" not in job.log.read_text(encoding="utf-8")


def test_a_wrong_request_is_refused_once(cluster, tmp_path):
    job = cluster.submit(tiny_config(tmp_path), 2, "model.pth=x", MAX_RESTARTS="3")
    facts = job.wait()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0")
    assert "model.pth" in job.output()


def test_a_run_that_fails_is_started_again_as_often_as_asked(cluster, tmp_path):
    job = cluster.submit(tiny_config(tmp_path), 2, MAX_RESTARTS="1", PYTHON="/bin/false")
    facts = job.wait("FAILED")
    assert (facts["ExitCode"], facts["Restarts"]) == ("1:0", "1")
    log = job.log.read_text(encoding="utf-8")
    assert "failed with status 1, restart 1 of 1: requeued" in log
    assert "failed with status 1 after 1 restarts" in log
    assert "asked to stop" not in log
