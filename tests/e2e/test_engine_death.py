"""An engine that dies, hangs or loses its rank: who hears of it, and that nothing is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.rollout.engine import EngineDied
from rlhf.rollout.host_client import EngineHost
from rlhf.rollout.lifeline import open_pidfd, wait_gone
from rlhf.rollout.zygote import Zygote
from tests.e2e.engine_case import (
    LIMIT_S,
    PROMPTS,
    EngineCase,
    engine_case,
    greedy,
    load_reference,
    make_spec,
    reference_state,
    sampled,
)
from tests.helpers.tiny_models import make_tiny

GONE_S = 10.0
LONG = [sampled(PROMPTS[1], k, seed=k, max_new_tokens=2 if k == 0 else 240) for k in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.fixture(scope="module")
def neighbour(zygote: Zygote, folder: Path) -> Iterator[EngineCase]:
    """Another engine of the same zygote, which nothing here may disturb."""
    with engine_case(folder, zygote) as engine:
        engine.write(reference_state(load_reference(folder)), 0)
        yield engine


@pytest.fixture
def case(zygote: Zygote, folder: Path, neighbour: EngineCase) -> Iterator[EngineCase]:
    with engine_case(folder, zygote) as engine:
        yield engine
    assert len(neighbour.generate([greedy(PROMPTS[1], 0)])[0].token_ids) == 16


def watch(pids: dict[str, int]) -> dict[str, int]:
    """Name -> pidfd: a pid may be used again, a pidfd not."""
    fds = {name: open_pidfd(pid) for name, pid in pids.items()}
    return {name: fd for name, fd in fds.items() if fd is not None}


def assert_gone(pidfds: dict[str, int]) -> None:
    left = {name for name, fd in pidfds.items() if not wait_gone([fd], GONE_S)}
    for fd in pidfds.values():
        os.close(fd)
    assert not left


def assert_no_zombie(pid: int) -> None:
    deadline = time.monotonic() + GONE_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["host", "scheduler tp0", "detokenizer"])
def test_death_of_an_idle_engine_is_an_event_with_a_cause(case: EngineCase, name: str) -> None:
    pidfds = watch(case.info.pids)
    os.kill(case.info.pids[name], signal.SIGKILL)
    with pytest.raises(EngineDied, match=rf"{name} \(pid {case.info.pids[name]}\).*SIGKILL"):
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            case.engine.poll()
    for call in (case.engine.poll, case.engine.sleep, lambda: case.generate(LONG)):
        with pytest.raises(EngineDied, match=name):  # told again, not waited for
            call()
    assert_gone(pidfds)


@pytest.mark.parametrize("name", ["host", "scheduler tp0", "detokenizer"])
def test_death_in_mid_generation(case: EngineCase, name: str) -> None:
    case.write(reference_state(load_reference(case.folder)), 0)
    pidfds = watch(case.info.pids)

    def kill(_: object) -> None:
        os.kill(case.info.pids[name], signal.SIGKILL)

    with pytest.raises(EngineDied, match=rf"{name}.*SIGKILL"):
        case.engine.generate(LONG, kill, LIMIT_S)
    assert_gone(pidfds)


def test_death_of_one_scheduler_of_two_in_mid_generation(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote, tp=2) as case:
        case.write(reference_state(load_reference(folder)), 0)
        pidfds = watch(case.info.pids)

        def kill(_: object) -> None:
            os.kill(case.info.pids["scheduler tp1"], signal.SIGKILL)

        with pytest.raises(EngineDied, match="scheduler tp1"):
            case.engine.generate(LONG, kill, LIMIT_S)
        assert_gone(pidfds)


@pytest.mark.parametrize("name", ["host", "scheduler tp0"])
def test_death_inside_an_update_ends_the_movement(case: EngineCase, name: str) -> None:
    case.open(reference_state(load_reference(case.folder)))
    case.begin()
    os.kill(case.info.pids[name], signal.SIGKILL)
    with pytest.raises(EngineDied, match=rf"{name}.*SIGKILL"):
        for _ in range(100):  # updates that may still end well while the death is noticed
            case.run_movers()
            case.engine.end_update(0)
            case.begin()


def test_stopped_host_counts_as_dead(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote, hang_limit_s=3.0) as case:
        pidfds = watch(case.info.pids)
        os.kill(case.info.pids["host"], signal.SIGSTOP)
        with pytest.raises(EngineDied, match=r"host did not answer for 3 s"):
            case.engine.wake()
        assert_gone(pidfds)


def test_stopped_scheduler_counts_as_dead(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote, hang_limit_s=3.0) as case:
        case.write(reference_state(load_reference(folder)), 0)
        pidfds = watch(case.info.pids)

        def stop(_: object) -> None:
            os.kill(case.info.pids["scheduler tp0"], signal.SIGSTOP)

        with pytest.raises(EngineDied, match=r"scheduler did not answer for 3 s"):
            case.engine.generate(LONG, stop, LIMIT_S)
        assert_gone(pidfds)


def test_close_leaves_no_process(zygote: Zygote, folder: Path) -> None:
    with engine_case(folder, zygote) as case:
        pidfds = watch(case.info.pids)
        case.engine.close()
        assert_gone(pidfds)
        for pid in case.info.pids.values():
            assert_no_zombie(pid)
        case.engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            case.engine.sleep()


def test_engine_that_cannot_start_says_why(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    broken = make_tiny(tmp_path / "hf", "llama")
    (broken / "config.json").write_text("{}")
    spec = make_spec(folder, model_path=str(broken))
    engine = EngineHost.launch(spec, zygote)
    with pytest.raises(EngineDied, match=r"engine host: ValueError: .*model_type"):
        engine.wait_ready()
    engine.close()


def test_scheduler_that_cannot_start_says_why(zygote: Zygote, tmp_path: Path) -> None:
    """A model that is too big for the machine: the failure is deep in a child."""
    folder = make_tiny(tmp_path / "hf", "llama")
    spec = make_spec(folder)  # our own reader would refuse such a size
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 10**12}))
    engine = EngineHost.launch(spec, zygote)
    with pytest.raises(EngineDied, match=r"scheduler tp0: .*memory"):
        engine.wait_ready()
    engine.close()


def test_start_beyond_the_limit_is_ended(zygote: Zygote, folder: Path) -> None:
    engine = EngineHost.launch(make_spec(folder), zygote)
    with pytest.raises(EngineDied, match="not ready within 0 s"):
        engine.wait_ready(timeout_s=0.0)
    engine.close()


def start_rank(
    zygote: str, folder: Path, work: str
) -> tuple[subprocess.Popen[str], dict[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.engine_rank", zygote, folder, work],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_killed_rank_takes_its_engine_and_no_other(
    zygote: Zygote, folder: Path, neighbour: EngineCase
) -> None:
    """The host is the zygote's child, and still it goes with its rank."""
    process, pids = start_rank(zygote.address, folder, "idle")
    with process:
        pidfds = watch(pids)
        assert set(pidfds) == {"host", "scheduler tp0", "detokenizer"}
        process.kill()
    assert_gone(pidfds)
    assert_no_zombie(pids["host"])
    assert len(neighbour.generate([greedy(PROMPTS[1], 0)])[0].token_ids) == 16


def test_killed_rank_takes_an_engine_that_is_stopped(zygote: Zygote, folder: Path) -> None:
    """A host that cannot run its own watcher is ended by the zygote."""
    process, pids = start_rank(zygote.address, folder, "idle")
    with process:
        pidfds = watch(pids)
        os.kill(pids["host"], signal.SIGSTOP)
        process.kill()
    assert_gone(pidfds)


def test_killed_owner_takes_its_zygote(folder: Path) -> None:
    process, pids = start_rank("own", folder, "start")
    with process:
        pidfds = watch(pids)
        assert set(pidfds) == {"zygote"}
        process.kill()
    assert_gone(pidfds)


@pytest.mark.slow
def test_killed_rank_takes_its_spawned_engine(folder: Path) -> None:
    process, pids = start_rank("none", folder, "idle")
    with process:
        pidfds = watch(pids)
        assert set(pidfds) == {"host", "scheduler tp0", "detokenizer"}
        process.kill()
    assert_gone(pidfds)


@pytest.mark.slow
def test_spawned_engine_serves_and_dies_like_a_forked_one(folder: Path) -> None:
    with engine_case(folder, None) as case:
        case.write(reference_state(load_reference(folder)), 0)
        assert len(case.generate([greedy(PROMPTS[1], 0)])[0].token_ids) == 16
        pidfds = watch(case.info.pids)
        os.kill(case.info.pids["scheduler tp0"], signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"scheduler tp0.*SIGKILL"):
            case.generate(LONG)
        assert_gone(pidfds)
