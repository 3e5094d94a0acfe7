"""Laws of the family tables, over random models and layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.families import (
    check_rollout,
    check_train,
    engine_layers,
    full_pieces,
    full_shapes,
    pad_vocab,
    padded_vocab,
    rollout_padding_params,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.piece import Piece, box_size
from tests.helpers.shapes import make_shape, rollout_layouts, shapes, train_layouts
from tests.helpers.shards import slices

MOE = {"family": "qwen3_moe"}
VOCABULARY = ("word_embeddings", "output_layer", "embed_tokens", "lm_head")


def check_tiling(pieces: list[Piece], params: dict[str, tuple[int, ...]]) -> None:
    """Each element of each parameter lies in one piece; only vocabulary rows may lie in none."""
    counts = {name: np.zeros(shape, int) for name, shape in params.items()}
    for piece in pieces:
        wide = [b - a for a, b in piece.region if b - a > 1]
        wide = wide[::-1] if piece.transposed else wide
        assert wide == [b - a for a, b in piece.local if b - a > 1]
        assert box_size(piece.region) == box_size(piece.local)
        part = counts[piece.param][slices(piece.local)]
        assert part.size == box_size(piece.local), f"{piece} is outside of its parameter"
        part += 1
    for name, count in counts.items():
        assert count.max() <= 1, f"{name} is covered twice"
        if count.min() == 1:
            continue
        assert any(word in name for word in VOCABULARY), f"{name} is not covered"
        rows = count.all(1)
        assert np.array_equal(count.any(1), rows)
        assert not rows[rows.sum() :].any(), f"padding of {name} is not at its end"


def check_cover(full: dict[str, tuple[int, ...]], shards: list[list[Piece]]) -> None:
    """Over all ranks every element of every full tensor is held, and nothing else."""
    covered = {name: np.zeros(shape, bool) for name, shape in full.items()}
    for shard in shards:
        for piece in shard:
            covered[piece.tensor][slices(piece.region)] = True
    assert [name for name, held in covered.items() if not held.all()] == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_train_pieces_tile_parameters_and_cover_tensors(data):
    shape = data.draw(shapes())
    layout = data.draw(train_layouts(shape))
    shards = [train_pieces(shape, layout, r) for r in range(layout.world)]
    for rank, pieces in enumerate(shards):
        check_tiling(pieces, train_param_shapes(shape, layout, rank))
    check_cover(full_shapes(shape), shards)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rollout_pieces_tile_parameters_and_cover_tensors(data):
    shape = data.draw(shapes())
    layout = data.draw(rollout_layouts(shape))
    shards = [rollout_pieces(shape, layout, r) for r in range(layout.world)]
    for rank, pieces in enumerate(shards):
        check_tiling(pieces, rollout_param_shapes(shape, layout, rank))
    for engine in range(layout.num_engines):
        check_cover(full_shapes(shape), [shards[r] for r in layout.engine_ranks(engine)])


def _rows(pieces: list[Piece], param: str) -> list[str]:
    """Labels of the rows of a local parameter, top to bottom: q0, q1, ..., k0, ..."""
    labels: dict[int, str] = {}
    for piece in pieces:
        if piece.param.endswith(param):
            kind = piece.tensor.split(".")[-2][0]
            (start, stop), (at, _) = piece.region[0], piece.local[0]
            labels.update((at + i, f"{kind}{start + i}") for i in range(stop - start))
    return [labels[i] for i in range(len(labels))]


def test_megatron_keeps_each_kv_group_together():
    shape = make_shape(num_attention_heads=4, num_key_value_heads=2, head_dim=1)
    layout = TrainLayout(2, tp=2)
    shards = [train_pieces(shape, layout, r) for r in range(2)]
    rows = [_rows(pieces, "layers.0.self_attention.linear_qkv.weight") for pieces in shards]
    assert rows == [["q0", "q1", "k0", "v0"], ["q2", "q3", "k1", "v1"]]


def test_engine_keeps_queries_keys_and_values_together():
    shape = make_shape(num_attention_heads=4, num_key_value_heads=2, head_dim=1)
    pieces = rollout_pieces(shape, RolloutLayout(1), 0)
    rows = _rows(pieces, "layers.0.self_attn.qkv_proj.weight")
    assert rows == ["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"]


def test_neighbouring_engine_ranks_share_a_kv_head():
    shape = make_shape(num_attention_heads=8, num_key_value_heads=2, head_dim=1)
    layout = RolloutLayout(4, tp=4)
    rows = [
        _rows(rollout_pieces(shape, layout, r), "layers.0.self_attn.qkv_proj.weight")
        for r in range(4)
    ]
    assert [r[2:] for r in rows] == [["k0", "v0"], ["k0", "v0"], ["k1", "v1"], ["k1", "v1"]]


@pytest.mark.parametrize("tp,rank,expected", [(2, 0, [0, 1, 2, 3]), (4, 3, [6, 7])])
def test_gate_lies_above_up_on_every_rank(tp, rank, expected):
    shape = make_shape(intermediate_size=8)
    for pieces, param in (
        (rollout_pieces(shape, RolloutLayout(tp, tp=tp), rank), "layers.1.mlp.gate_up_proj.weight"),
        (train_pieces(shape, TrainLayout(tp, tp=tp), rank), "layers.1.mlp.linear_fc1.weight"),
    ):
        wanted = [f"g{i}" for i in expected] + [f"u{i}" for i in expected]
        assert _rows(pieces, param) == wanted


def test_tied_embeddings_exist_once_per_stage():
    shape = make_shape("qwen2", tie_word_embeddings=True)
    one = train_param_shapes(shape, TrainLayout(1), 0)
    assert "output_layer.weight" not in one
    last = train_pieces(shape, TrainLayout(2, pp=2), 1)
    held = {p.tensor for p in last if p.param == "output_layer.weight"}
    assert held == {"model.embed_tokens.weight"}
    assert "lm_head.weight" not in rollout_param_shapes(shape, RolloutLayout(1), 0)
    engine_last = rollout_pieces(shape, RolloutLayout(2, pp=2), 1)
    assert {p.tensor for p in engine_last if p.param == "lm_head.weight"} == held
    assert "lm_head.weight" not in full_shapes(shape)


def test_tied_head_does_not_exist_beside_an_embedding_of_padding_only():
    shape = make_shape(vocab_size=5, tie_word_embeddings=True)
    params = rollout_param_shapes(shape, RolloutLayout(4, tp=4), 3)
    assert params["model.embed_tokens.weight"] == (16, 20)
    assert "lm_head.weight" not in params
    assert rollout_padding_params(shape, RolloutLayout(4, tp=4), 3) == {"model.embed_tokens.weight"}
    assert not rollout_padding_params(shape, RolloutLayout(4, tp=4), 0)


def test_virtual_chunks_have_their_own_names():
    shape = make_shape(num_hidden_layers=4)
    pieces = train_pieces(shape, TrainLayout(2, pp=2, vpp=2), 1)
    layers = {
        p.param.split(".self_attention")[0]: p.tensor.split(".self_attn")[0]
        for p in pieces
        if "linear_proj" in p.param
    }
    assert layers == {
        "chunk0.decoder.layers.0": "model.layers.1",
        "chunk1.decoder.layers.0": "model.layers.3",
    }
    assert any(p.param == "chunk1.output_layer.weight" for p in pieces)


def test_engine_gives_extra_layers_to_the_last_stages():
    assert [list(engine_layers(5, 3, s)) for s in range(3)] == [[0], [1, 2], [3, 4]]


def test_vocabulary_is_padded_to_equal_shares():
    assert pad_vocab(151936, 128, 4) == 152064
    assert pad_vocab(65536, 128, 4) == 65536
    shape = make_shape(vocab_size=131)
    assert padded_vocab(shape, 4) == 132
    assert rollout_param_shapes(shape, RolloutLayout(2, tp=2), 1)["lm_head.weight"] == (96, 20)


@pytest.mark.parametrize(
    "settings_,layout,words",
    [
        ({"num_key_value_heads": 2}, TrainLayout(4, tp=4), ["train.tp: 4", "KV heads 2"]),
        ({}, TrainLayout(3, tp=3), ["train.tp: 3", "attention heads 8"]),
        ({}, TrainLayout(5, pp=5), ["train.pp=5", "layers, 4"]),
        ({}, TrainLayout(2, ep=2), ["train.ep: must be 1, is 2", "no experts"]),
        ({}, TrainLayout(2, etp=2), ["train.etp: must be left out, is 2", "no experts"]),
        (MOE, TrainLayout(5, ep=5), ["train.ep: 5", "experts 12", "one of 1, 2, 3, 4, 6, 12"]),
        (MOE, TrainLayout(3, etp=3), ["train.etp: 3", "expert feed-forward size 16", "8, 16"]),
        ({**MOE, "num_key_value_heads": 2}, TrainLayout(4, tp=4), ["train.tp: 4", "KV heads 2"]),
        (
            {"family": "deepseek_v3", "moe_intermediate_size": 5},
            TrainLayout(4, tp=4, etp=1),
            ["train.tp: 4", "shared experts' size 10"],
        ),
    ],
)
def test_layouts_that_megatron_cannot_cut_are_refused(settings_, layout, words):
    with pytest.raises(LayoutError) as caught:
        check_train(make_shape(**settings_), layout)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "family,settings_,layout,words",
    [
        (
            "llama",
            {"tie_word_embeddings": True},
            RolloutLayout(2, pp=2),
            ["rollout.pp: must be 1, is 2", "tied"],
        ),
        ("llama", {}, RolloutLayout(2, tp=2, dp=2), ["rollout.dp: must be 1, is 2", "no DP-a"]),
        ("qwen3", {}, RolloutLayout(3, tp=3), ["rollout.tp: 3", "8 attention heads"]),
        ("qwen3", {"num_key_value_heads": 3, "num_attention_heads": 12}, RolloutLayout(2, tp=2),
         ["rollout.tp: 2", "3 KV heads"]),
    ],
)  # fmt: skip
def test_layouts_that_sglang_cannot_cut_are_refused(family, settings_, layout, words):
    with pytest.raises(LayoutError) as caught:
        check_rollout(make_shape(family, **settings_), layout)
    assert all(word in str(caught.value) for word in words)


def test_latent_attention_has_no_kv_heads_to_divide():
    shape = make_shape("deepseek_v3", num_key_value_heads=3)
    check_train(shape, TrainLayout(8, tp=8))
    check_rollout(shape, RolloutLayout(8, tp=8))


def test_whole_dense_layers_need_no_division_by_tp():
    """With DP-attention an engine has them on every rank."""
    shape = make_shape("glm4_moe", intermediate_size=23)
    check_rollout(shape, RolloutLayout(2, tp=2, dp=2))
    with pytest.raises(LayoutError, match="feed-forward size 23"):
        check_rollout(shape, RolloutLayout(2, tp=2))


def test_the_expert_bias_is_float32_on_both_sides_and_in_files():
    shape = make_shape("deepseek_v3")
    for pieces in (
        train_pieces(shape, TrainLayout(2, pp=2), 1),
        rollout_pieces(shape, RolloutLayout(2, tp=2, ep=2), 1),
        full_pieces(shape),
    ):
        own = {p.tensor: p.dtype for p in pieces if p.dtype is not None}
        assert own
        assert own == {p.tensor: "float32" for p in pieces if "e_score" in p.tensor}


def test_experts_have_global_numbers_in_files_and_local_ones_in_megatron():
    shape = make_shape("qwen3_moe")
    layout = TrainLayout(4, ep=4)
    held = [
        (p.param.split("linear_fc2.")[1], p.tensor.split("experts.")[1].split(".")[0])
        for p in train_pieces(shape, layout, 2)
        if p.param.startswith("decoder.layers.0.") and "linear_fc2" in p.param
    ]
    assert held == [("weight0", "6"), ("weight1", "7"), ("weight2", "8")]


def test_the_engine_stacks_the_experts_of_a_rank():
    """Of 12 experts over ep=2 the second group has 6 to 11; each lies over its two ranks."""
    shape = make_shape("qwen3_moe")
    layout = RolloutLayout(4, tp=4, ep=2)
    assert rollout_param_shapes(shape, layout, 3)["model.layers.1.mlp.experts.w13_weight"] == (
        6, 16, 20,
    )  # fmt: skip
    up = next(
        p
        for p in rollout_pieces(shape, layout, 3)
        if p.tensor == "model.layers.1.mlp.experts.7.up_proj.weight"
    )
    assert up.region == ((8, 16), (0, 20))
    assert up.local == ((1, 2), (8, 16), (0, 20))


@pytest.mark.parametrize(
    ("family", "grid", "words"),
    [
        ("llama", {"tp": 2, "redundant_experts": 2}, r"must be 0, is 2: llama has no experts"),
        ("glm4_moe", {"tp": 2, "ep": 2, "redundant_experts": 2}, "glm4_moe has no room"),
        ("qwen3_moe", {"tp": 2, "ep": 1, "redundant_experts": 2}, r"\(rollout\.ep-1\)=0, is 2"),
        ("qwen3_moe", {"tp": 2, "ep": 2, "redundant_experts": 14}, r"=12, is 14: .* twice"),
        ("qwen3_moe", {"tp": 4, "ep": 4, "redundant_experts": 2},
         r"12 experts and 2 redundant ones, 14 together"),
    ],
)  # fmt: skip
def test_copies_of_experts_that_cannot_be_are_refused(family, grid, words):
    with pytest.raises(LayoutError, match=words):
        check_rollout(make_shape(family), RolloutLayout(grid["tp"], **grid))


def test_redundant_experts_are_copies_of_the_first_ones_on_the_last_ranks():
    """12 experts and 4 copies over 4 groups: SGLang's order of slots, modulo 12."""
    shape, layout = make_shape("qwen3_moe"), RolloutLayout(4, tp=4, ep=4, redundant_experts=4)
    held = [
        [p.tensor.split(".")[5] for p in rollout_pieces(shape, layout, rank)
         if p.tensor.startswith("model.layers.0.mlp.experts.") and "down" in p.tensor]
        for rank in range(4)
    ]  # fmt: skip
    assert held == [[str(n % 12) for n in range(r * 4, r * 4 + 4)] for r in range(4)]
