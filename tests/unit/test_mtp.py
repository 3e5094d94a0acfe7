"""Laws of the tables of layers for multi-token prediction."""

from __future__ import annotations

import pytest

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.reshard.schedule import rank_plans
from rlhf.reshard.topology import Topology
from rlhf.weights.families import (
    full_pieces,
    full_shapes,
    mtp_layers,
    reshard_spread,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from tests.helpers.reshard_oracle import count_costs_of_shards, shard_bytes
from tests.helpers.shapes import make_shape
from tests.unit.test_families import check_cover, check_tiling

FAMILIES = ("deepseek_v3", "glm4_moe")
TRAIN = [TrainLayout(1), TrainLayout(8, tp=2, pp=2, ep=2, etp=1), TrainLayout(2, pp=2, vpp=2)]
ROLLOUT = [RolloutLayout(1), RolloutLayout(4, tp=4, dp=2, ep=2)]


def _shape(family, num_mtp=1, **settings):
    return make_shape(family, num_nextn_predict_layers=num_mtp, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_mtp", [1, 2])
def test_mtp_layers_are_added_to_what_a_trainer_holds(family, num_mtp):
    shape = _shape(family, num_mtp)
    for layout in TRAIN:
        shards = [train_pieces(shape, layout, r, mtp=True) for r in range(layout.world)]
        for rank, pieces in enumerate(shards):
            check_tiling(pieces, train_param_shapes(shape, layout, rank, mtp=True))
            without = train_pieces(shape, layout, rank)
            assert [p for p in pieces if p in set(without)] == without
            more = [p for p in pieces if p not in set(without)]
            last = layout.coord(rank).pp == layout.pp - 1
            names = {p.param.split("mtp.")[0] for p in more if ".layers." in p.param}
            assert names == ({"chunk1." if layout.vpp > 1 else ""} if last else set())
            beside = {p.tensor for p in more if ".layers." not in p.param}
            assert beside == ({"model.embed_tokens.weight"} if last and layout.pp > 1 else set())
        check_cover(full_shapes(shape, mtp=True), shards)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["none", "block_fp8"])
def test_mtp_layers_are_added_to_what_an_engine_holds(family, quantization):
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    shape = _shape(family, **sizes)
    for plain in ROLLOUT:
        layout = RolloutLayout(
            plain.world, tp=plain.tp, dp=plain.dp, ep=plain.ep, quantization=quantization
        )
        shards = [rollout_pieces(shape, layout, r, mtp=True) for r in range(layout.world)]
        for rank, pieces in enumerate(shards):
            check_tiling(pieces, rollout_param_shapes(shape, layout, rank, mtp=True))
            without = rollout_pieces(shape, layout, rank)
            assert pieces[: len(without)] == without
            assert all(p.param.startswith("draft.model.") for p in pieces[len(without) :])
            scales = [p for p in pieces[len(without) :] if p.param.endswith("scale_inv")]
            assert bool(scales) == (quantization != "none")
            assert not any("eh_proj" in p.param for p in scales)
        full = full_shapes(shape, mtp=True)
        held = [[p for p in pieces if not p.tensor.endswith("scale_inv")] for pieces in shards]
        check_cover(full, held)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "train,rollout",
    [
        (TrainLayout(1), RolloutLayout(1)),
        (TrainLayout(8, tp=2, pp=2, ep=2, etp=1), RolloutLayout(8, tp=4, dp=2, ep=2)),
        (TrainLayout(8, pp=2, vpp=2, ep=4), RolloutLayout(8, tp=4, ep=4, a2a="deepep")),
        (TrainLayout(4, tp=2, ep=2), RolloutLayout(4, tp=2)),
    ],
)
def test_mtp_layers_are_moved_with_the_rest(family, train, rollout):
    """Everything that is asked arrives, and what crosses ranks is the least possible."""
    shape, ranks, topology = _shape(family), range(train.world), Topology.of(train.world, 2)
    held = [train_pieces(shape, train, rank, mtp=True) for rank in ranks]
    needed = [rollout_pieces(shape, rollout, rank, mtp=True) for rank in ranks]
    plans = rank_plans(
        reshard_spread(shape, train, rollout, mtp=True), topology, itemsize=2, area_bytes=1 << 16
    )
    arrived = [[p.transfer for r in mine.rounds for p in r.arriving] for mine in plans]
    for pieces, transfers in zip(needed, arrived, strict=True):
        assert {p.param for p in pieces} == {t.param for t in transfers}
        assert sum(t.num_bytes for t in transfers) == shard_bytes(pieces, 2)
    costs = count_costs_of_shards(held, needed, topology.nodes, 2)
    moved = [t for transfers in arrived for t in transfers if t.source != t.destination]
    assert sum(t.num_bytes for t in moved) == costs.lower_bound
    nodes = topology.nodes
    crossing = sum(t.num_bytes for t in moved if nodes[t.source] != nodes[t.destination])
    assert crossing == costs.cross_node_lower_bound


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_layers_follow_the_layers_in_the_checkpoint(family):
    shape = _shape(family, 2, num_hidden_layers=3)
    assert list(mtp_layers(shape)) == [3, 4]
    without, full = full_pieces(shape), full_pieces(shape, mtp=True)
    assert full[: len(without)] == without
    more = {p.tensor for p in full[len(without) :]}
    assert {name.split(".")[2] for name in more} == {"3", "4"}
    layer = {n.removeprefix("model.layers.2.") for n in full_shapes(shape) if "layers.2." in n}
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    for number in (3, 4):
        prefix = f"model.layers.{number}."
        assert {n.removeprefix(prefix) for n in more if n.startswith(prefix)} == layer | own
    assert full_shapes(shape, mtp=True)["model.layers.4.eh_proj.weight"] == (20, 40)
    biases = {p.tensor for p in full[len(without) :] if p.dtype}
    assert biases == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (3, 4)}


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: train_pieces(make_shape("qwen3_moe"), TrainLayout(1), 0, mtp=True), "qwen3_moe"),
        (lambda: full_pieces(make_shape("llama"), mtp=True), "llama has no layers for multi"),
        (
            lambda: train_pieces(_shape("glm4_moe", 0), TrainLayout(1), 0, mtp=True),
            "num_nextn_predict_layers of the model is 0",
        ),
        (
            lambda: rollout_pieces(_shape("glm4_moe", 2), RolloutLayout(1), 0, mtp=True),
            "has 1 MTP layer, the model has 2",
        ),
        (
            lambda: rollout_pieces(_shape("glm4_moe"), RolloutLayout(2, pp=2), 0, mtp=True),
            "rollout.pp: must be 1, is 2",
        ),
        (
            lambda: reshard_spread(make_shape(), TrainLayout(1), RolloutLayout(1), mtp=True),
            "llama has no layers for multi",
        ),
        (
            lambda: reshard_spread(
                _shape("deepseek_v3"), TrainLayout(2), RolloutLayout(2, pp=2), mtp=True
            ),
            "rollout.pp: must be 1, is 2",
        ),
    ],
)
def test_a_model_or_layout_without_them_is_refused(make, words):
    with pytest.raises(LayoutError, match=words):
        make()
