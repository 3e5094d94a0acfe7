"""Megatron's own shards give up their memory between two updates and come back from engines.

Ranks are gloo processes with real models, buffers and optimizers; each has an engine process with
the real receiver.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.dist.layout import RolloutLayout
from rlhf.weights.families import rollout_pieces, train_pieces
from rlhf.weights.model_shape import load_model_shape
from tests.dist.parity_case import Case, layout_of
from tests.helpers.reshard_oracle import count_costs_of_shards
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

SP = {"tp": 2, "sequence_parallel": True}
CASES = {
    "qwen2": (
        {"vocab_size": 515},
        Case("tp2 pp2", {**SP, "pp": 2}, dtype="bfloat16"),
        {"tp": 4},
    ),
    "deepseek_v3": (
        {},
        Case(
            "pp2 ep2",
            {"pp": 2, "ep": 2, "moe": {"bias_update_rate": 0.01}},
            micro=2,
            dtype="bfloat16",
        ),
        {"tp": 2, "ep": 2},
    ),
    "qwen3": ({}, Case("tp2 dp2", SP, micro=2), {"tp": 1}),
}


def _trip(rank: int, world: int, run: Any, case: Case, rollout: RolloutLayout, engine: Any) -> Any:
    """Its window open in the engine process; and what a release keeps."""
    import torch

    from rlhf.reshard.restore import kept_rows
    from rlhf.reshard.round_trip import round_trip
    from rlhf.reshard.topology import Topology
    from rlhf.reshard.transport import DistTransport
    from rlhf.weights import families
    from tests.helpers.round_trips import both_plans

    model, dtype = run.model, getattr(torch, case.dtype)
    there, back = both_plans(
        model.shape,
        model.layout,
        rollout,
        Topology.of(world, 2),
        itemsize=dtype.itemsize,
        area_bytes=1 << 15,
    )
    trip = round_trip(
        there[rank],
        back[rank],
        model.params,
        DistTransport(),
        dtype=dtype,
        limit_s=30.0,
        padding_params=families.rollout_padding_params(model.shape, rollout, rank),
    )
    pieces = families.rollout_pieces(model.shape, rollout, rank)
    shapes = families.rollout_param_shapes(model.shape, rollout, rank)
    engine.make_model(shapes, case.dtype, {p.param: p.dtype for p in pieces if p.dtype})
    engine.load(trip.open_message())
    trip.reshard.window.wait_opened(30.0, lambda: None)
    return trip, kept_rows(model.shape, model.layout, rollout, rank, model.params, dtype)


def _move(engine: Any, mover: Any) -> Any:
    engine.begin(mover.update_message())
    stats = mover.run(lambda: None)
    engine.end()
    return stats


def _with_release(
    rank: int, world: int, run: Any, case: Case, rollout: RolloutLayout, engine: Any
) -> dict[str, Any]:
    from rlhf.memory.released import ReleasedParams
    from tests.helpers.round_trips import differing, snapshot

    trip, kept = _trip(rank, world, run, case, rollout, engine)
    run.optimizer.wait_params()
    run.model.release_gradients()
    before = snapshot(run.model.params)
    there = _move(engine, trip.reshard)
    pointers = engine.ask("pointers")
    memory = ReleasedParams(run.model.params, kept)
    buffers = [b for c in run.model.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    left = sum(b.param_data.untyped_storage().nbytes() for b in buffers)
    left += sum(p.untyped_storage().nbytes() for p in run.model.params.values())
    released = memory.num_bytes
    memory.take_back()
    empty = differing(run.model.params, before)
    back = _move(engine, trip.restore)
    return {
        "released": released,
        "needed": sum(t.nbytes for t in before.values()),
        "left": left,
        "empty": len(empty),
        "params": len(before),
        "wrong": differing(run.model.params, before),
        "engine_moved": engine.ask("pointers") != pointers,
        "sent": back.sent_bytes,
        "received": back.received_bytes,
        "rounds": min(there.num_rounds, back.num_rounds),
    }


def _run(rank: int, world: int, folders: dict[str, str]) -> dict[str, Any]:
    from rlhf.mcore import parallel
    from rlhf.platform.megatron_cpu import install
    from tests.dist.training_case import Training
    from tests.helpers.engine_process import EngineProcess

    install()
    engine, out = EngineProcess(), {}
    for family, folder in folders.items():
        _, case, rollout = CASES[family]
        straight = Training(rank, world, folder, case)
        updates = straight.train(2) + straight.train(2)
        parallel.shutdown()
        run = Training(rank, world, folder, case)
        first = run.train(2)
        found = _with_release(rank, world, run, case, RolloutLayout(world, **rollout), engine)
        out[family] = {**found, "straight": updates, "updates": first + run.train(2)}
        parallel.shutdown()
    engine.close()
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        family: str(make_tiny(root / family, family, **changes))
        for family, (changes, _, _) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(folders):
    return run_ranks(_run, 4, folders, timeout_s=240)


def _least(folder, case, rollout):
    """Bytes that each rank needs of others at least, on nodes of two."""
    shape, train = load_model_shape(folder), layout_of(case, 4)
    return count_costs_of_shards(
        [rollout_pieces(shape, RolloutLayout(4, **rollout), r) for r in range(4)],
        [train_pieces(shape, train, r) for r in range(4)],
        (0, 0, 1, 1),
        {"bfloat16": 2, "float32": 4}[case.dtype],
    ).lower_bound_by_rank


@pytest.mark.parametrize("family", CASES)
def test_a_shard_without_memory_comes_back_from_engines(folders, results, family):
    of_ranks = [result[family] for result in results]
    for rank in of_ranks:
        assert rank["left"] == 0 and rank["released"] >= rank["needed"]
        assert rank["empty"] > rank["params"] / 2  # nothing had survived by chance
        assert rank["wrong"] == []
        assert not rank["engine_moved"]
        assert rank["rounds"] > 2
    least = _least(folders[family], *CASES[family][1:])
    assert [r["received"] for r in of_ranks] == least
    assert sum(r["sent"] for r in of_ranks) == sum(least)


@pytest.mark.parametrize("family", CASES)
def test_training_goes_on_as_if_nothing_had_happened(results, family):
    """Loss, gradient norm and rate of the updates before and after, bit by bit."""
    for result in results:
        assert result[family]["updates"] == result[family]["straight"]
