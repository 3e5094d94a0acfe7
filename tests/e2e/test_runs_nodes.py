"""Whole runs with one engine over two nodes: two torchrun agents of one rank, on one machine."""

import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.helpers.runs import (
    finish_nodes,
    read_metrics,
    rlhf,
    start_nodes,
    tiny_config,
    wait_for,
)

NOT_REPEATED = (
    "seconds/",
    "memory_gib/",
    "memory/",
    "tokens_per_s/",
    "time",
    "reshard/verify_s",
    "share/",
)
ROLLOUTS = {
    "qwen2": {"tp": 2},
    "deepseek_v3": {"tp": 2, "dp": 2, "ep": 2},
}
GONE_S = 10
ENDS_S = 30


@pytest.fixture
def own_tmp(monkeypatch):
    """A TMPDIR for the runs of a test; its path is short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def config_of(folder, family, run, **sections):
    """PP2 training of a tiny model whose folder the runs of a test share."""
    return tiny_config(
        folder,
        family,
        run_dir=str(folder / run),
        rollout={**ROLLOUTS[family], "sampling": {"max_new_tokens": 6, "stop": [">"]}},
        **sections,
    )


def of_ranks(err):
    """Without torchrun's own lines: the agent that ends last misses the one that held its store."""
    return "".join(x for x in err.splitlines(True) if "torch/distributed/elastic/" not in x)


def steps(run_dir):
    return [line for line in read_metrics(run_dir) if "reward/mean" in line]


def family_of(processes):
    """pid -> process of all that the agents have started."""
    found = [p for a in processes for p in psutil.Process(a.pid).children(recursive=True)]
    return {p.pid: p for p in found}


def scratch_of(own_tmp):
    """Folders of the runs that were started with this TMPDIR."""
    return {p.name for p in own_tmp.glob("rlhf-run-*")}


def assert_nothing_left(own_tmp, scratch):
    """Neither in TMPDIR nor in /dev/shm, where names carry that of the folder."""
    assert len(scratch) == 2, "each node has its own"
    assert not scratch_of(own_tmp)
    shared = [p.name for p in Path("/dev/shm").iterdir()]
    assert [n for n in shared if any(s in n for s in scratch)] == []


def assert_gone(pids):
    wait_for(
        lambda: all(not psutil.pid_exists(p) or _is_zombie(p) for p in pids), GONE_S, "the end"
    )


def _is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("family", ["qwen2", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_a_run_with_an_engine_over_two_nodes_is_the_run_on_one(family, tmp_path, own_tmp):
    """Every update is verified; the metrics are those of the same configuration on one node."""
    status, _, err = rlhf("train", str(config_of(tmp_path, family, "one")))
    assert status == 0, err
    two = start_nodes(2, str(config_of(tmp_path, family, "two")))
    for status, _, err in finish_nodes(two):
        assert status == 0, err
        assert "Traceback" not in of_ranks(err)
        assert "stopped:" not in err
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        names = [n for n in a if not n.startswith(NOT_REPEATED)]
        assert {n: b[n] for n in names} == pytest.approx({n: a[n] for n in names}, abs=1e-5)
        assert b["gap/mean_abs"] <= 1e-5
    assert not scratch_of(own_tmp)


def test_a_scheduler_killed_on_the_second_node_ends_all_ranks_by_its_name(tmp_path, own_tmp):
    config = config_of(tmp_path, "qwen2", "run", num_steps=400, data={"eval": []})
    agents = start_nodes(2, str(config))
    journal = tmp_path / "run" / "metrics.jsonl"
    wait_for(
        lambda: (
            any(a.poll() is not None for a in agents)
            or (journal.exists() and steps(tmp_path / "run"))
        ),
        180,
        "the first step",
    )
    assert [a.poll() for a in agents] == [None, None], finish_nodes(agents, GONE_S)
    pids, scratch = family_of(agents), scratch_of(own_tmp)
    second = family_of(agents[1:])
    (victim,) = [pid for pid, p in second.items() if "scheduler" in p.name()]
    os.kill(victim, signal.SIGKILL)
    ended = finish_nodes(agents, ENDS_S)
    assert all(status != 0 for status, _, _ in ended)
    told = re.findall(r"^stopped: .*$", "".join(err for _, _, err in ended), re.MULTILINE)
    cause = rf"node 1 of its 2: scheduler tp1 \(pid {victim}\) was killed by SIGKILL"
    assert len(told) == 1, told
    assert re.search(
        rf"rank 1, phase .*EngineDied: the rollout engine died on \S+, {cause}", told[0]
    )
    assert_gone(pids)
    assert_nothing_left(own_tmp, scratch)


def test_an_engine_that_fits_no_nodes_is_refused_by_both_numbers(tmp_path):
    config = config_of(tmp_path, "qwen2", "run")
    ended = finish_nodes(start_nodes(3, str(config)), 120)
    assert all(status != 0 for status, _, _ in ended)
    assert any("rollout: world=3 must be a multiple of tp*pp=2" in err for _, _, err in ended)
