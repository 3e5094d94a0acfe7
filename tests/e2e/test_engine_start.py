"""Ranks of one node, started as a launcher starts them, share one zygote; engines keep to ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf.dist.ports import ENGINE_PORTS, plan_ports
from rlhf.rollout.lifeline import open_pidfd, wait_gone
from rlhf.rollout.zygote import Zygote
from tests.e2e.engine_case import engine_case
from tests.helpers.tiny_models import make_tiny

LAUNCHER = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
}
"""As under torchrun inside a Slurm job; nobody serves the store that it promises."""


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    folder = make_tiny(tmp_path / "hf", "llama")
    command = [sys.executable, "-W", "ignore", "-m", "tests.e2e.engine_rank", "node", folder]
    started = [
        subprocess.Popen(
            [*command, "close"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | LAUNCHER | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_of_a_node_share_one_zygote_and_leave_nothing(
    ranks: list[subprocess.Popen[str]],
) -> None:
    pids = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout]
    zygote = pids[0]["zygote"]
    assert "zygote" not in pids[1]
    assert [parent_of(p["host"]) for p in pids] == [zygote, zygote]
    assert len({pid for p in pids for pid in p.values()}) == 7
    fds = [open_pidfd(pid) for p in pids for pid in p.values()]
    for rank in reversed(ranks):  # the owner of the zygote last
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.wait(30) == 0
    assert wait_gone([fd for fd in fds if fd is not None], 10.0)
    for fd in fds:
        if fd is not None:
            os.close(fd)


@pytest.mark.parametrize("dp", [1, 2])
def test_an_engine_with_planned_ports_listens_on_no_other(
    zygote: Zygote, tmp_path: Path, dp: int
) -> None:
    """But on those that the kernel gives out itself."""
    folder = make_tiny(tmp_path / "hf", "qwen3")
    first = plan_ports(os.getpid(), 0, 1, 1, ENGINE_PORTS).engine(0)[0]
    kernels = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    with engine_case(folder, zygote, tp=2, dp=dp, first_port=first) as case:
        found = [
            connection.laddr.port
            for pid in case.info.pids.values()
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
    planned = [port for port in found if port < int(kernels.split()[0])]
    assert planned
    assert set(planned) <= set(range(first, first + ENGINE_PORTS))
