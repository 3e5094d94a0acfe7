"""An optimizer state on the host: every update is that of a state on the device, bit by bit."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch

from tests.dist.parity_case import TEMPERATURE, Case
from tests.dist.training_case import Training
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

BF16 = "bfloat16"
SP = {"tp": 2, "sequence_parallel": True}
MOE = {"moe": {"bias_update_rate": 0.01}}
FEW_BYTES, MANY_BYTES = 12 * 1000, 2**24
"""Of a buffer: cuts inside most shards; and the whole state in one."""
CASES = {
    "qwen2": [
        Case("bf16 dp2", dtype=BF16),
        Case("bf16 dp2 alone", {"overlap": False}, dtype=BF16),
        Case("bf16 pp2 vpp2", {"pp": 2, "vpp": 2}, dtype=BF16),
        Case("dp2"),
        Case("tp2", SP),
    ],
    "deepseek_v3": [
        Case("bf16 ep2", {**MOE, "ep": 2}, micro=2, dtype=BF16),
        Case("bf16 tp2 ep2", {**MOE, **SP, "ep": 2, "etp": 1}, dtype=BF16),
        Case("ep2", {**MOE, "ep": 2}, micro=2),
    ],
}
NAMES = [case.name for cases in CASES.values() for case in cases]


def state_of(run):
    """Of this rank's shards, by parameter: digest of weights, master and moments; steps."""
    from rlhf.mcore.checkpoint import _adam_step

    names = {id(p): name for name, p in run.model.params.items()}
    out = {name: _digest(p) for name, p in run.model.params.items()}
    with run.optimizer.state.shown():
        for part in run.optimizer.inner.chained_optimizers:
            for param in part.model_param_group_index_map:
                held = part._get_main_param_and_optimizer_states(param)
                for kind, tensor in held.items():
                    out[names[id(param)], kind] = _digest(tensor)
    return out | {"steps": _adam_step(run.optimizer)}


def _digest(tensor):
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def _updates(rank, world, folder, case, host_buffer_bytes):
    """Two updates, one whose gradient is not finite, one more; weights again from masters."""
    from rlhf.mcore import parallel
    from rlhf.mcore.forward import train

    run = Training(rank, world, folder, case, host_buffer_bytes)
    start = state_of(run)
    stats = run.train(2)

    def broken(logprobs, entropy, columns):
        value, sums = run.loss(logprobs, entropy, columns)
        return value * math.nan, sums

    skipped = train(run.model, run.optimizer, run.micro, broken, TEMPERATURE)
    stats += run.train(1)
    after = state_of(run)
    if run.optimizer.has_masters:
        for param in run.model.params.values():
            if param.requires_grad:
                param.detach().fill_(torch.nan)
        run.optimizer.write_params()
    again = state_of(run)
    parallel.shutdown()
    return {
        "stats": stats,
        "skipped": (skipped.ok, skipped.lr),
        "states": (start, after),
        "written": again == after,
    }


def _kept_on_device(rank, world, folder, case):
    """What the optimizer holds on the device between updates, and what an update takes."""
    from rlhf.mcore import parallel

    run = Training(rank, world, folder, case, FEW_BYTES)
    run.train(1)
    held = [
        param.untyped_storage().nbytes()
        for part in run.optimizer.inner.chained_optimizers
        for group in part.optimizer.param_groups
        for param in group["params"]
    ]
    state = run.optimizer.state
    moments = sum(len(p.optimizer.state) for p in run.optimizer.inner.chained_optimizers)
    parallel.shutdown()
    return {
        "held": sum(held) + moments,
        "taken": [buffer.nbytes for buffer in state.buffers()],
        "cuts": len(state._order),
        "inside": sum(span.start > 0 for chunk in state._order for span in chunk.spans),
        "groups": len({(shard.part, shard.group) for shard in state._shards}),
    }


def _run_all(rank, world, folders):
    from rlhf.platform.megatron_cpu import install

    install()
    out = {}
    for family, folder in folders.items():
        for case in CASES[family]:
            kinds = {"device": None, "few": FEW_BYTES}
            if case.name in ("bf16 dp2", "ep2"):
                kinds["many"] = MANY_BYTES
            out[case.name] = {
                kind: _updates(rank, world, Path(folder), case, size)
                for kind, size in kinds.items()
            }
    return out | {
        "kept": _kept_on_device(rank, world, Path(folders["deepseek_v3"]), CASES["deepseek_v3"][0])
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    folders = {
        family: str(make_tiny(root / family, family, **settings))
        for family, settings in {"qwen2": {"vocab_size": 515}, "deepseek_v3": {}}.items()
    }
    return run_ranks(_run_all, 2, folders, timeout_s=400)


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_those_of_a_state_on_the_device(results, name):
    for rank in results:
        expected = rank[name].pop("device")
        first, last = expected["states"]
        assert first != last
        assert expected["skipped"][0] is False
        assert last["steps"] == 3
        for got in rank[name].values():
            assert got["stats"] == expected["stats"]
            assert got["skipped"] == expected["skipped"]
            for mine, theirs in zip(got["states"], expected["states"], strict=True):
                assert {key for key in theirs if mine.get(key) != theirs[key]} == set()
            assert got["written"]


def test_the_device_has_two_small_buffers_while_it_updates_and_nothing_else(results):
    for rank in results:
        kept = rank["kept"]
        assert kept["held"] == 0
        assert max(kept["taken"]) <= FEW_BYTES
        assert len(kept["taken"]) == 2
        assert kept["cuts"] > 10
        assert kept["inside"] > 10
        assert kept["groups"] > 2  # of weights that decay and that do not, dense and expert
