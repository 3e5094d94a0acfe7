"""One engine over two nodes, here two hosts on one machine: it answers as on one, and dies as one.

Each node has a host process of its own; they meet over loopback.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.rollout.addresses import free_block, port_blocks
from rlhf.rollout.engine import EngineDied, EngineLostPeer
from rlhf.rollout.lifeline import open_pidfd, wait_gone
from rlhf.rollout.zygote import Zygote
from tests.e2e.engine_case import (
    LIMIT_S,
    PROMPTS,
    EngineCase,
    engine_case,
    load_reference,
    reference_state,
    sampled,
)
from tests.helpers.runs import wait_for
from tests.helpers.tiny_models import make_tiny

GONE_S = 10.0
LAYOUTS = {
    "qwen2": {"tp": 2},
    "deepseek_v3": {"tp": 2, "dp": 2, "ep": 2},
    "qwen3": {"pp": 2},
}


def over_two_nodes(folder: Path, zygote: Zygote, **layout: Any) -> Any:
    address = f"127.0.0.1:{free_block(port_blocks(0, 1, os.getpid()))}"
    return engine_case(folder, zygote, num_nodes=2, address=address, **layout)


def assert_equal(shard: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit; padding is NaN in both."""
    assert shard.keys() == expected.keys()
    for name, tensor in shard.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True)


def answers(case: EngineCase) -> list[Any]:
    return case.generate([sampled(p, k, seed=k) for k, p in enumerate(PROMPTS)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "hf", "qwen2")


@pytest.fixture
def case(zygote: Zygote, folder: Path) -> Iterator[EngineCase]:
    with over_two_nodes(folder, zygote, tp=2) as engine:
        yield engine


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f == "qwen2" else [pytest.mark.slow]) for f in LAYOUTS],
)
def test_an_engine_over_two_nodes_answers_as_on_one(
    zygote: Zygote, tmp_path: Path, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Updates are verified on both nodes; sleeping engines forget their weights on both."""
    folder, layout = make_tiny(tmp_path / "hf", family), LAYOUTS[family]
    state = reference_state(load_reference(folder))
    with engine_case(folder, zygote, **layout) as one:
        one.write(state, 0)
        expected = answers(one)
    with over_two_nodes(folder, zygote, **layout) as two:
        pids = [set(two.info.pids), *map(set, two.follower_pids)]
        two.engine.sleep()
        two.engine.wake()
        two.write(state, 0)
        found = answers(two)
        for shard, exported in zip(two.read(), two.exported(state), strict=True):
            assert_equal(shard, exported)
    controller = {"data parallel controller"} if layout.get("dp", 1) > 1 else set()
    first, second = ("scheduler tp0", "scheduler tp1")
    if "pp" in layout:
        second = "scheduler tp0 pp1"
    assert pids == [{"host", first, "detokenizer"} | controller, {"host", second} | controller]
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert "Traceback" not in capfd.readouterr().err, "its end is told to nobody"


def test_a_scheduler_killed_on_the_second_node_is_named_there_and_lost_on_the_first(
    case: EngineCase, folder: Path
) -> None:
    case.write(reference_state(load_reference(folder)), 0)
    (pids,) = case.follower_pids
    victim = pids["scheduler tp1"]
    pidfds = [fd for p in (*case.info.pids.values(), *pids.values()) if (fd := open_pidfd(p))]
    long = [sampled(PROMPTS[1], k, seed=k, max_new_tokens=2 if k == 0 else 240) for k in range(4)]
    with pytest.raises(EngineLostPeer, match=r"node 0 of its 2: .*scheduler tp0"):
        case.engine.generate(long, lambda _: os.kill(victim, signal.SIGKILL), LIMIT_S)
    (follower,) = case.followers
    cause = rf"node 1 of its 2: scheduler tp1 \(pid {victim}\) was killed by SIGKILL"
    wait_for(lambda: re.search(cause, str(follower.death())), GONE_S, "the cause")
    with pytest.raises(EngineDied, match=cause) as found:
        follower.poll()
    assert not isinstance(found.value, EngineLostPeer)
    assert wait_gone(pidfds, GONE_S)
    for fd in pidfds:
        os.close(fd)
