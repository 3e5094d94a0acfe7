"""Laws of the tables of engines with block-fp8 weights."""

from __future__ import annotations

import pytest
import torch

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.block_fp8 import pack
from rlhf.weights.block_scales import (
    is_scale,
    scale_name,
    scale_piece,
    scale_shape,
    weight_box,
)
from rlhf.weights.families import (
    check_blocks,
    engine_block_faults,
    full_shapes,
    rollout_param_shapes,
    rollout_pieces,
    train_block_faults,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.piece import FLOAT8, box_size, intersect
from tests.helpers.shapes import make_shape
from tests.helpers.shards import cut, fp8_checkpoint, random_checkpoint, slices
from tests.unit.test_families import check_tiling

FP8 = "block_fp8"
SIZES = {
    "vocab_size": 131,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
EXPERTS = {"moe_intermediate_size": 256, "n_shared_experts": 1}
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
CASES = {
    "qwen2": ("qwen2", {}, TrainLayout(4, tp=2, pp=2), RolloutLayout(4, tp=2)),
    "qwen3, heads shared": ("qwen3", {}, TrainLayout(4), RolloutLayout(4, tp=4)),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS,
        TrainLayout(4, tp=2, ep=2, etp=1),
        RolloutLayout(4, tp=2, ep=2),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**EXPERTS, **LATENT},
        TrainLayout(4, tp=2, pp=2, ep=2, etp=1),
        RolloutLayout(4, tp=4, dp=2, ep=4, a2a="deepep"),
    ),
    "moonlight": (
        "deepseek_v3",
        {**EXPERTS, **LATENT, "q_lora_rank": None},
        TrainLayout(4, tp=2),
        RolloutLayout(4, tp=2),
    ),
    "glm4_moe": ("glm4_moe", EXPERTS, TrainLayout(2), RolloutLayout(2, tp=2, pp=1)),
}


def _case(key):
    family, settings, train, rollout = CASES[key]
    fp8 = RolloutLayout(
        **{n: getattr(rollout, n) for n in ("world", "tp", "dp", "ep", "pp", "a2a")},
        quantization=FP8,
    )
    return make_shape(family, **{**SIZES, **settings}), train, rollout, fp8


@pytest.mark.parametrize("key", CASES)
def test_fp8_pieces_tile_parameters_and_each_block_has_its_scale(key):
    shape, _, plain, fp8 = _case(key)
    sizes = full_shapes(shape)
    for rank in range(fp8.world):
        pieces, params = rollout_pieces(shape, fp8, rank), rollout_param_shapes(shape, fp8, rank)
        check_tiling(pieces, params)
        # nothing but dtypes and scales is different
        weights = [p for p in pieces if not is_scale(p.tensor)]
        assert [(p.tensor, p.region, p.param, p.local) for p in weights] == [
            (p.tensor, p.region, p.param, p.local) for p in rollout_pieces(shape, plain, rank)
        ]
        quantised = {p.param for p in weights if p.dtype == FLOAT8}
        assert {p.param for p in pieces if is_scale(p.tensor)} == {scale_name(n) for n in quantised}
        for name in quantised:
            assert params[scale_name(name)] == scale_shape(params[name])
        for piece in pieces:
            if is_scale(piece.tensor):
                weight = piece.tensor.removesuffix("_scale_inv")
                limits = scale_shape(sizes[weight])
                assert all(b <= n for (_, b), n in zip(piece.region, limits, strict=True))


@pytest.mark.parametrize("key", CASES)
def test_what_trainers_hold_gives_every_engine_its_fp8_checkpoint(key):
    """Quantised where it is held, rectangle by rectangle: the bytes of the whole model quantised
    at once, in every parameter of every engine rank.
    """
    shape, train, _, fp8 = _case(key)
    check_blocks(shape, train, fp8)
    wanted = fp8_checkpoint(shape)
    full = random_checkpoint(shape)
    shards = []
    for rank in range(train.world):
        pieces = train_pieces(shape, train, rank)
        shards.append((pieces, cut(full, pieces, train_param_shapes(shape, train, rank))))
    for rank in range(fp8.world):
        for need in rollout_pieces(shape, fp8, rank):
            if need.dtype == FLOAT8 or is_scale(need.tensor):
                _check_rectangle(need, shards, full_shapes(shape), wanted)


def _check_rectangle(need, shards, sizes, wanted):
    covered = 0
    weight = need.tensor.removesuffix("_scale_inv")
    done = set()
    for pieces, params in shards:
        for piece in (p for p in pieces if p.tensor == weight):
            held = scale_piece(piece, sizes[weight]) if is_scale(need.tensor) else piece
            part = intersect(need.region, held.region)
            if part is None or part in done:
                continue
            done.add(part)
            covered += box_size(part)
            if is_scale(need.tensor):
                source = params[held.param][slices(weight_box(part, held.region, held.local))]
                out = torch.empty([b - a for a, b in part])
                pack(source, "scale", out)
                assert torch.equal(out, wanted[need.tensor][slices(part)])
            else:
                at = tuple(
                    (a - o + low, b - o + low)
                    for (a, b), (o, _), (low, _) in zip(part, held.region, held.local, strict=True)
                )
                out = torch.empty([b - a for a, b in part], dtype=torch.float8_e4m3fn)
                pack(params[held.param][slices(at)], "weight", out)
                assert torch.equal(out.float(), wanted[need.tensor][slices(part)].float())
    assert covered == box_size(need.region)


def test_a_release_has_seventeen_rows_of_scales_in_front_of_attention():
    """DeepSeek-V3: 1536 rows of queries and 576 of keys and values in one parameter."""
    shape = _deepseek()
    layout = RolloutLayout(64, tp=64, dp=8, ep=64, a2a="deepep", quantization=FP8)
    param = "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"
    assert rollout_param_shapes(shape, layout, 9)[param] == (17, 56)
    pieces = [p for p in rollout_pieces(shape, layout, 9) if p.param == param]
    assert [(p.region[0], p.local[0]) for p in pieces] == [((0, 12), (0, 12)), ((0, 5), (12, 17))]


def _deepseek():
    return make_shape(
        "deepseek_v3",
        vocab_size=129280,
        num_hidden_layers=4,
        hidden_size=7168,
        intermediate_size=18432,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    )


ENGINES = [
    # (layout, faults: all that each must say)
    (RolloutLayout(64, tp=64, dp=8, ep=64, a2a="deepep"), []),
    (RolloutLayout(16, tp=16, ep=16), []),
    (
        RolloutLayout(32, tp=32, ep=32),
        [
            ["rollout.tp: a rank holds [0:576, 0:7168] of", "*.mlp.gate_proj", "cut at 576", "128"],
            ["mlp.up_proj.weight"],
            ["[0:7168, 0:576] of model.layers.*.mlp.down_proj.weight", "lower rollout.tp"],
            ["shared_experts.gate_proj"],
            ["shared_experts.up_proj"],
            ["shared_experts.down_proj"],
        ],
    ),
    (
        RolloutLayout(32, tp=32, dp=32),
        [
            ["[0:64, 0:7168] of model.layers.*.mlp.experts.*.gate_proj", "raise rollout.ep"],
            ["experts.*.up_proj"],
            ["experts.*.down_proj"],
            ["shared_experts.gate_proj"],
            ["shared_experts.up_proj"],
            ["shared_experts.down_proj"],
        ],
    ),
    (
        RolloutLayout(128, tp=128, ep=128, dp=1, a2a="deepep"),
        [
            ["self_attn.q_b_proj.weight", "cut at 192", "raise rollout.dp"],
            ["mlp.gate_proj"],
            ["mlp.up_proj"],
            ["mlp.down_proj"],
        ],
    ),
]


@pytest.mark.parametrize("layout,faults", ENGINES)
def test_an_engine_that_cuts_through_a_block_is_refused_by_name(layout, faults):
    assert list(engine_block_faults(_deepseek(), layout)) == []
    settings = {n: getattr(layout, n) for n in ("world", "tp", "dp", "ep", "pp", "a2a")}
    fp8 = RolloutLayout(**settings, quantization=FP8)
    found = list(engine_block_faults(_deepseek(), fp8))
    assert len(found) == len(faults), found
    assert all(fault.startswith("rollout.tp: a rank holds") for fault in found)
    for words in faults:
        assert any(all(word in fault for word in words) for fault in found), (words, found)
    if faults:
        with pytest.raises(LayoutError, match="must be a multiple of 128"):
            rollout_pieces(_deepseek(), fp8, layout.tp - 1)
    else:
        rollout_pieces(_deepseek(), fp8, layout.tp - 1)


TRAINERS = [
    ("qwen3", {}, TrainLayout(4, tp=2), []),
    # each KV group lies for itself between queries, keys and values
    ("qwen3", {"head_dim": 64}, TrainLayout(1), ["train.tp", "k_proj", "v_proj"]),
    ("qwen3", {"intermediate_size": 192}, TrainLayout(2, tp=2), ["train.tp", "gate", "down"]),
    ("qwen3_moe", EXPERTS, TrainLayout(4, tp=2, etp=4), ["train.etp", "*.gate_proj", "*.down"]),
    ("qwen3_moe", EXPERTS, TrainLayout(4, tp=2, ep=4, etp=1), []),
]


@pytest.mark.parametrize("family,settings,train,words", TRAINERS)
def test_training_that_cuts_through_a_block_is_refused_by_name(family, settings, train, words):
    shape = make_shape(family, **{**SIZES, **settings})
    engine = RolloutLayout(train.world, quantization=FP8)
    assert list(train_block_faults(shape, train, RolloutLayout(train.world))) == []
    faults = list(train_block_faults(shape, train, engine))
    assert bool(faults) == bool(words)
    for word in words:
        assert any(word in fault for fault in faults), (word, faults)
    assert all("multiple of 128" in fault and "quantization to none" in fault for fault in faults)
    if faults and not list(engine_block_faults(shape, engine)):
        with pytest.raises(LayoutError, match=r"train\.e?tp: "):
            check_blocks(shape, train, engine)


def test_sizes_that_no_layout_can_have_are_refused_as_such():
    narrow = {**SIZES, **EXPERTS, **LATENT, "q_lora_rank": 192}
    shape = make_shape("deepseek_v3", **narrow)
    (fault,) = engine_block_faults(shape, RolloutLayout(1, quantization=FP8))
    assert "rollout.quantization: must be none" in fault
    assert "kv_a_proj_with_mqa.weight begins at 192 of" in fault
    llama = make_shape("llama", **SIZES)
    (fault,) = engine_block_faults(llama, RolloutLayout(1, quantization=FP8))
    assert fault.startswith("rollout.quantization: must be none: SGLang's llama")
