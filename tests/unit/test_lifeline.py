"""Processes end with their owner, and what they say last is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rlhf.rollout.lifeline import (
    LINE_BYTES,
    describe_exit,
    engine_environment,
    kill_pidfd,
    open_pidfd,
    peek_exit,
    read_obituary,
    wait_gone,
    write_obituary,
)

SLEEPER = "import signal; signal.pause()"
CHILD = f"""
import sys
from rlhf.rollout.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
{SLEEPER}
"""
PARENT = f"""
import os, subprocess, sys
command = [sys.executable, "-c", {CHILD!r}, str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
{SLEEPER}
"""


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = open_pidfd(int(parent.stdout.readline()))
        assert child is not None
        assert not wait_gone([child], 0.0)
        parent.kill()
    assert wait_gone([child], 10.0)
    assert wait_gone([child], 0.0)
    os.close(child)


def test_a_child_whose_parent_is_gone_already_ends_itself() -> None:
    code = "from rlhf.rollout.lifeline import die_with_parent; die_with_parent(-1); print('lives')"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "lives" not in result.stdout


def test_launcher_and_allocator_settings_stay_with_the_rank() -> None:
    dropped = {
        "RANK": "1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    kept = {"PATH": "/bin", "HOME": "/root", "SGLANG_PLATFORM": "rlhf_cpu", "HF_HOME": "/hf"}
    environment = engine_environment({**dropped, **kept}, "cpu")
    assert not dropped.keys() & environment.keys()
    assert kept.items() <= environment.items()
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in engine_environment(kept, "cuda")


@pytest.fixture
def obituary() -> tuple[int, int]:
    return os.pipe2(os.O_NONBLOCK)


def test_an_obituary_is_one_line_for_each_writer(obituary: tuple[int, int]) -> None:
    read, write = obituary
    write_obituary(write, "first\n  cause ")
    write_obituary(write, "x" * 2 * LINE_BYTES)
    write_obituary(write, "first cause")
    lines = read_obituary(read)
    assert lines == ["first cause", "x" * (LINE_BYTES - 1)]
    assert read_obituary(read) == []
    os.close(write)
    assert read_obituary(read) == []
    os.close(read)


def test_an_obituary_never_waits(obituary: tuple[int, int]) -> None:
    """Neither for a reader that does not read nor for one that is gone."""
    read, write = obituary
    for _ in range(100):
        write_obituary(write, "y" * LINE_BYTES)
    os.close(read)
    write_obituary(write, "z")
    os.close(write)


def test_an_exit_is_described() -> None:
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-64) == "was killed by SIGRTMAX"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(None) == "is gone"


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_an_exit_can_be_seen_without_taking_it(code: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    pidfd = os.pidfd_open(process.pid)
    assert wait_gone([pidfd], 10.0)
    assert peek_exit(pidfd) == status
    assert process.wait() == status
    assert peek_exit(pidfd) is None
    kill_pidfd(pidfd)
    os.close(pidfd)
