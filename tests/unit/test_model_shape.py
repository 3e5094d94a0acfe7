"""Facts of a model's config.json, and what is said when one is missing."""

from __future__ import annotations

import json

import pytest

from rlhf.weights.model_shape import (
    MLAShape,
    MoEShape,
    YarnRope,
    load_model_shape,
    parse_model_shape,
)
from tests.helpers.shapes import make_shape

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 20,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "max_position_embeddings": 64,
}


def test_a_file_is_read_as_its_object(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert load_model_shape(tmp_path) == make_shape("llama")


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
)
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in RAW.items() if k != key}))
    with pytest.raises(ValueError, match=rf"{file}: key '{key}' is missing"):
        load_model_shape(tmp_path)


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        load_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [([RAW], "must hold a JSON object, holds a list"), ({**RAW, "hidden_size": None}, "NoneType")],
)
def test_a_file_that_holds_something_else_is_named(tmp_path, raw, words):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        load_model_shape(tmp_path)


DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = {  # of the released config.json, as are the others
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**DEEPSEEK_ROPE, "type": "yarn"},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_deepseek_v3():
    shape = parse_model_shape(DEEPSEEK)
    assert shape.mla == MLAShape(1536, 512, 128, 64, 128)
    assert (shape.head_dim, shape.rotary_dim, shape.num_kv_heads) == (192, 64, 128)
    assert shape.rope_scaling == YarnRope(40, 4096, 32, 1, 1, 1)
    assert shape.moe == MoEShape(256, 8, 2048, 1, 3, "sigmoid", True, 2.5, 8, 4, True)
    assert [shape.has_experts(n) for n in (0, 2, 3, 60)] == [False, False, True, True]
    assert shape.num_mtp_layers == 1 and not shape.qk_norm and not shape.qkv_bias


def test_newer_forms_of_a_config_say_the_same():
    """As transformers 5 writes them: rope_parameters, and no keys for what its class fixes."""
    gone = ("rope_scaling", "rope_theta", "topk_method", "scoring_func", "moe_layer_freq")
    newer = {k: v for k, v in DEEPSEEK.items() if k not in gone}
    newer["rope_parameters"] = {**DEEPSEEK_ROPE, "rope_type": "yarn", "rope_theta": 10000.0}
    assert parse_model_shape({**newer, "rope_interleave": True}) == parse_model_shape(DEEPSEEK)
    glm = {k: v for k, v in GLM.items() if k not in ("rope_theta", "partial_rotary_factor")}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert parse_model_shape({**glm, "rope_parameters": rope}) == parse_model_shape(GLM)
    qwen = {k: v for k, v in QWEN_MOE.items() if k != "num_experts"}
    assert parse_model_shape({**qwen, "num_local_experts": 128}) == parse_model_shape(QWEN_MOE)


def test_moonlight_has_a_plain_query_and_no_yarn():
    shape = parse_model_shape({**DEEPSEEK, "q_lora_rank": None, "rope_scaling": None})
    assert shape.mla is not None and shape.mla.q_lora_rank is None
    assert shape.rope_scaling is None


def test_glm_4_5():
    shape = parse_model_shape(GLM)
    assert (shape.qkv_bias, shape.qk_norm, shape.rotary_dim, shape.mla) == (True, True, 64, None)
    assert shape.moe == MoEShape(160, 8, 1536, 1, 3, "sigmoid", True, 2.5, 1, 1, True)
    air = parse_model_shape({**GLM, "use_qk_norm": False})
    assert not air.qk_norm


def test_qwen3_moe():
    shape = parse_model_shape(QWEN_MOE)
    assert shape.moe == MoEShape(128, 8, 768, 0, 0, "softmax", True, 1.0, 1, 1, False)
    assert shape.qk_norm and shape.rotary_dim == 128


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (QWEN_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        (QWEN_MOE, {"use_sliding_window": True}, "use_sliding_window=true"),
        (QWEN_MOE, {"tie_word_embeddings": True}, "tie_word_embeddings=true"),
        (QWEN_MOE, {"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        (QWEN_MOE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK, {"topk_method": "greedy"}, 'topk_method="greedy"'),
        (DEEPSEEK, {"scoring_func": "softmax"}, 'scoring_func="softmax"'),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave=false"),
        (DEEPSEEK, {"rope_scaling": {"type": "llama3"}}, "supported are 'default', 'yarn'"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            DEEPSEEK,
            {"rope_scaling": {**DEEPSEEK_ROPE, "type": "yarn", "attention_factor": 2.0}},
            "rope attention_factor=2.0",
        ),
        (RAW, {"rope_scaling": {"rope_type": "yarn"}}, "supported are 'default', 'llama3'"),
    ],
)
def test_what_is_not_trained_is_refused_with_its_key(raw, change, words):
    with pytest.raises(ValueError) as caught:
        parse_model_shape({**raw, **change})
    assert words in str(caught.value)
