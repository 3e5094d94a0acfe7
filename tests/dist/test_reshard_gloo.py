"""Resharding between gloo ranks and engine processes: real window, real receiver."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from rlhf.dist.layout import RolloutLayout, TrainLayout
from tests.helpers.spawn import run_ranks

PAIRS = {
    2: [
        ("llama", {}, {"tp": 2}, {"tp": 1}),
        ("qwen2", {"tie_word_embeddings": True}, {"pp": 2}, {"tp": 2}),
        ("qwen3", {}, {"pp": 2, "first": 1}, {"tp": 1}),
        ("qwen3", {"num_key_value_heads": 1}, {}, {"tp": 2}),
        ("qwen2", {"tie_word_embeddings": True}, {"tp": 2}, {"pp": 2}),
    ],
    4: [
        ("llama", {}, {"tp": 2, "pp": 2}, {"tp": 2}),
        ("qwen2", {"tie_word_embeddings": True}, {"tp": 4}, {"tp": 1}),
        ("qwen3", {"num_key_value_heads": 2}, {"pp": 2, "vpp": 2}, {"tp": 4}),
        ("qwen3", {}, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2}),
        ("llama", {"vocab_size": 5}, {"tp": 2}, {"tp": 4}),
    ],
}


class _Rank:
    """One rank's mover between two layouts of a model, its window open in an engine process."""

    def __init__(self, rank: int, engine: Any, pair: tuple, limit_s: float = 30.0) -> None:
        import torch

        from rlhf.reshard.execute import Mover
        from rlhf.reshard.schedule import rank_plan
        from rlhf.reshard.topology import Topology
        from rlhf.reshard.transport import DistTransport
        from rlhf.reshard.windows import Window
        from rlhf.weights import families
        from tests.helpers.shapes import make_shape
        from tests.helpers.shards import coded_tensors, cut

        family, settings, train, rollout = pair
        world = torch.distributed.get_world_size()
        shape = make_shape(family, **settings)
        layouts = TrainLayout(world, **train), RolloutLayout(world, **rollout)
        sides = [
            [make(shape, layout, r) for r in range(world)]
            for make, layout in zip(
                (families.train_pieces, families.rollout_pieces), layouts, strict=True
            )
        ]
        self.pieces = sides[1][rank]
        self.shapes = families.rollout_param_shapes(shape, layouts[1], rank)
        self.full = coded_tensors(families.full_shapes(shape), torch.float32)
        local = families.train_param_shapes(shape, layouts[0], rank)
        self.params = cut(self.full, sides[0][rank], local)
        mine = rank_plan(
            families.reshard_spread(shape, *layouts),
            Topology.of(world, 2),
            rank,
            itemsize=4,
            area_bytes=2048,
        )
        self.mover = Mover(
            mine,
            self.params,
            DistTransport(),
            Window(mine.incoming_area_bytes, num_sums=mine.num_arriving),
            dtype=torch.float32,
            limit_s=limit_s,
            padding_params=families.rollout_padding_params(shape, layouts[1], rank),
        )
        self.engine = engine
        engine.make_model(self.shapes)
        engine.load(self.mover.open_message())
        self.mover.window.wait_opened(10.0, lambda: None)

    def update(self) -> Any:
        self.engine.begin(self.mover.update_message(verify=True))
        stats = self.mover.run(lambda: None, verify=True)
        self.engine.end()
        return stats

    def num_wrong(self) -> int:
        """Elements of the engine that differ from the full tensors' slices."""
        import torch

        from tests.helpers.shards import cut

        wanted = cut(self.full, self.pieces, self.shapes)
        wrong = 0
        for name, array in self.engine.ask("weights").items():
            real = wanted[name] >= 0
            wrong += int((torch.from_numpy(array)[real] != wanted[name][real]).sum())
        return wrong


def _reshard_pairs(rank: int, world: int, pairs: list[tuple]) -> list[dict[str, Any]]:
    from tests.helpers.engine_process import EngineProcess

    engine, out = EngineProcess(), []
    for pair in pairs:
        me = _Rank(rank, engine, pair)
        pointers = engine.ask("pointers")
        stats = me.update()
        wrong = me.num_wrong()
        for name in me.params:
            me.params[name] = me.params[name] + 1
        me.full = {name: tensor + 1 for name, tensor in me.full.items()}
        me.update()
        out.append(
            {
                **dataclasses.asdict(stats),
                "wrong": wrong + me.num_wrong(),
                "moved": engine.ask("pointers") != pointers,
            }
        )
    engine.close()
    return out


@pytest.mark.parametrize("world", sorted(PAIRS))
def test_engines_hold_the_trained_weights_after_each_update(world):
    results = run_ranks(_reshard_pairs, world, PAIRS[world], timeout_s=180)
    for i, pair in enumerate(PAIRS[world]):
        of_ranks = [ranks[i] for ranks in results]
        assert [r["wrong"] for r in of_ranks] == [0] * world, pair
        assert not any(r["faults"] for r in of_ranks), pair
        assert not any(r["moved"] for r in of_ranks), pair
        assert sum(r["sent_bytes"] for r in of_ranks) == sum(r["received_bytes"] for r in of_ranks)
        assert min(r["num_rounds"] for r in of_ranks) > 2


def _engine_fails(rank: int, world: int) -> str:
    """Rank 1's engine has a parameter that shrank after the opening."""
    from tests.helpers.engine_process import EngineProcess

    engine = EngineProcess()
    me = _Rank(rank, engine, ("llama", {}, {"tp": 2}, {"tp": 1}), limit_s=5.0)
    if rank == 1:
        engine.ask("cut", ("model.layers.1.mlp.gate_up_proj.weight", 7))
    try:
        me.update()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_engine_error_reaches_its_rank_and_stops_the_peer():
    peer, owner = run_ranks(_engine_fails, 2)
    assert "parameter model.layers.1.mlp.gate_up_proj.weight" in owner
    assert "rank 1, round" in owner
    assert "rank 0, round" in peer and re.search(r"first [\w.]+: rank 1 ", peer)


def _peer_dies(rank: int, world: int) -> str:
    from tests.helpers.engine_process import EngineProcess

    me = _Rank(rank, EngineProcess(), ("llama", {}, {"tp": 2}, {"tp": 1}), limit_s=20.0)
    if rank == 1:
        del me.params["decoder.layers.3.mlp.linear_fc2.weight"]
    try:
        me.update()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_lost_a_parameter_names_it_and_the_peer_does_not_hang():
    peer, owner = run_ranks(_peer_dies, 2)
    assert "parameter decoder.layers.3.mlp.linear_fc2.weight is gone" in owner
    assert "rank 1, round" in owner
    assert "rank 1" in peer
