"""The zygote's address, its peers, and how little it costs to start one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlhf.rollout.zygote import Zygote, node_address, start_zygote


def test_starting_a_zygote_imports_nothing_heavy() -> None:
    code = (
        "import rlhf.rollout.zygote, sys;"
        "print(sorted({'torch', 'sglang', 'numpy', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_ranks_of_a_launch_agree_on_the_address_and_launches_differ() -> None:
    launch = {"MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
    address = node_address({**launch, "LOCAL_RANK": "0"})
    assert address == node_address({**launch, "LOCAL_RANK": "1"})
    assert address != node_address({**launch, "MASTER_PORT": "29501"})
    assert address != node_address({**launch, "TORCHELASTIC_RESTART_COUNT": "1"})


def test_only_the_first_local_rank_starts_one() -> None:
    joined = start_zygote({"MASTER_PORT": "1", "LOCAL_RANK": "1"})
    assert joined is not None
    assert joined.pid is None
    with pytest.raises(RuntimeError, match="started by local rank 0"):
        joined.connect(limit_s=0.0)
    joined.close()


def test_a_zygote_takes_requests_before_it_has_imported_and_ends_when_told() -> None:
    zygote = Zygote.start(f"rlhf-unit-{os.getpid()}")
    zygote.connect(limit_s=1.0).close()
    with pytest.raises(OSError, match="in use"):
        Zygote.start(zygote.address, bind_limit_s=0.0)
    zygote.close(limit_s=0.0)
    with pytest.raises(RuntimeError, match="no zygote"):
        zygote.connect(limit_s=0.0)
