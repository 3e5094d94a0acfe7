"""Block fp8 against SGLang itself: its conversion, and where its classes load an fp8 checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from rlhf.dist.layout import RolloutLayout
from rlhf.rollout.receiver import DERIVED
from rlhf.weights.block_fp8 import quantize
from rlhf.weights.families import rollout_param_shapes, rollout_pieces
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.sglang_probe import Coded, load_many
from tests.helpers.shards import cut, fp8_checkpoint
from tests.helpers.tiny_models import make_tiny

SIZES = {
    "vocab_size": 131,
    "hidden_size": 320,  # no multiple of 128
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 128,
}
LATENT = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,  # below the queries: 320 rows, three blocks
    "num_key_value_heads": 4,
}
MODELS = {
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "deepseek_v3": {"family": "deepseek_v3", **LATENT},
    "moonlight": {"family": "moonlight", **LATENT, "q_lora_rank": None},
    "glm4_moe": {"family": "glm4_moe"},
}
LLAMA = "llama, which is refused"
LAYOUTS = [  # (model, layout, ranks to look at)
    ("qwen2", {"tp": 4}, [2]),
    ("qwen3", {"tp": 1}, [0]),
    ("qwen3", {"tp": 2, "pp": 2}, [3]),
    ("qwen3_moe", {"tp": 2}, [1]),
    ("qwen3_moe", {"tp": 4, "ep": 2}, [3]),
    ("deepseek_v3", {"tp": 1}, [0]),
    ("deepseek_v3", {"tp": 2, "ep": 2}, [1]),
    ("deepseek_v3", {"tp": 4, "dp": 2, "ep": 4, "a2a": "deepep"}, [1]),
    ("moonlight", {"tp": 2}, [0]),
    ("glm4_moe", {"tp": 2}, [1]),
]
PROBED = {
    f"{name} {'-'.join(f'{k}{v}' for k, v in layout.items())} rank {rank}": (
        name,
        RolloutLayout(
            layout.get("tp", 1) * layout.get("pp", 1), **layout, quantization="block_fp8"
        ),
        rank,
    )
    for name, layout, ranks in LAYOUTS
    for rank in ranks
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny(root / name, **{**SIZES, **settings})
        for name, settings in {**MODELS, "llama": {"family": "llama"}}.items()
    }


@pytest.fixture(scope="module")
def lives(folders):
    probes = {key: Coded(str(folders[n]), *at, "bfloat16") for key, (n, *at) in PROBED.items()}
    one = RolloutLayout(1, quantization="block_fp8")
    probes[LLAMA] = Coded(str(folders["llama"]), one, 0, "bfloat16")
    return dict(zip(probes, load_many(list(probes.values())), strict=True))


@pytest.mark.parametrize("key", PROBED)
def test_tables_equal_what_sglang_loads_of_an_fp8_checkpoint(folders, lives, key):
    name, layout, rank = PROBED[key]
    shape = load_model_shape(folders[name])
    live = {n: p for n, p in lives[key].items() if not n.endswith(DERIVED)}
    pieces = rollout_pieces(shape, layout, rank)
    shapes = rollout_param_shapes(shape, layout, rank)
    assert {n: p.values.shape for n, p in live.items()} == shapes
    dtypes = {p.param: p.dtype or "bfloat16" for p in pieces}
    assert {n: p.dtype for n, p in live.items() if n in dtypes} == dtypes
    wanted = cut({n: t.float() for n, t in fp8_checkpoint(shape).items()}, pieces, shapes)
    for param, loaded in live.items():
        got, padded = torch.from_numpy(loaded.values), param.startswith(("lm_head", "model.embed"))
        real = wanted[param] != -1 if padded else torch.ones_like(wanted[param], dtype=torch.bool)
        assert torch.equal(got[real], wanted[param][real]), param


@pytest.mark.parametrize("size", [(128, 128), (576, 320), (2112, 200), (1, 1)], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e38, 1e-6, 1e-44, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_conversion_is_sglangs_bit_for_bit(size, magnitude, dtype):
    from sglang.srt.layers.quantization.mxfp8_block_convert import bf16_to_block_fp8_128

    generator = torch.Generator().manual_seed(size[0])
    weight = (torch.randn(size, generator=generator) * 0.3 * magnitude).to(dtype)
    values, scales = quantize(weight)
    wanted, wanted_scales = bf16_to_block_fp8_128(weight)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), wanted_scales.view(torch.int32))


def test_a_llama_loses_the_scales_of_blocks(folders, lives):
    """Why its table refuses block fp8."""
    unwritten = {n for n, p in lives[LLAMA].items() if "weight_scale_inv" in n}
    assert unwritten
    assert all((lives[LLAMA][name].values == -1).all() for name in unwritten)


def test_a_gpu_engine_is_told_how_its_weights_are_kept():
    """With arguments that SGLang has, and the words of the tables' own models."""
    from sglang.srt.arg_groups.choices import FP8_GEMM_RUNNER_BACKEND_CHOICES
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER

    from rlhf.rollout.engine import EngineSpec
    from rlhf.rollout.sglang_args import BLOCK_FP8
    from rlhf.rollout.sglang_engine import server_args

    sizes = {"model_path": "m", "vocab_size": 100, "max_position": 64, "context_tokens": 32}
    plain = server_args(EngineSpec(**sizes, device="cuda"))
    told = server_args(EngineSpec(**sizes, device="cuda", quantization="block_fp8"))
    added = {name: told[name] for name in told.keys() - plain.keys()}
    assert {name: told[name] for name in plain} == plain
    assert json.loads(added.pop("json_model_override_args")) == BLOCK_FP8
    assert added.pop("fp8_gemm_runner_backend") in FP8_GEMM_RUNNER_BACKEND_CHOICES
    assert not added
    assert {*told} <= {*POSITIONAL_FIELD_ORDER}
