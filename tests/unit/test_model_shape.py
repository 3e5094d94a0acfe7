"""Facts of a model's config.json, and what is said when one is missing."""

from __future__ import annotations

import json

import pytest

from rlhf.weights.model_shape import (
    NEEDED_KEYS,
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


@pytest.mark.parametrize(
    ("family", "key"), [(name, key) for name, keys in NEEDED_KEYS.items() for key in keys]
)
def test_what_readers_take_for_different_things_must_be_written(family, key):
    whole = {"deepseek_v3": DEEPSEEK, "glm4_moe": GLM}[family]
    assert parse_model_shape(whole).moe is not None
    with pytest.raises(KeyError, match=key):
        parse_model_shape({k: v for k, v in whole.items() if k != key})


@pytest.mark.parametrize(("key", "most"), [("num_hidden_layers", 4096), ("vocab_size", 2**24)])
def test_a_size_with_digits_too_many_is_refused_with_both_numbers(key, most):
    with pytest.raises(ValueError, match=rf"{key}: must be at most {most}, is 1000000000"):
        parse_model_shape({**RAW, key: 10**9})
    with pytest.raises(ValueError, match=r"n_routed_experts: must be at most 16384, is 20000"):
        parse_model_shape({**DEEPSEEK, "n_routed_experts": 20000})


def test_a_file_that_is_not_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: must hold a JSON object: "):
        load_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([RAW], "must hold a JSON object, holds a list"),
        ({**RAW, "hidden_size": None}, "hidden_size: must be .* is null"),
    ],
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


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (RAW, {"architectures": 5}, "architectures: must be a list of names, is 5"),
        (RAW, {"architectures": "LlamaForCausalLM"}, "architectures: must be a list of names"),
        (RAW, {"hidden_size": "20"}, 'hidden_size: must be a whole number of at least 1, is "20"'),
        (RAW, {"hidden_size": True}, "hidden_size: must be a whole number"),
        (RAW, {"num_hidden_layers": 2.5}, "num_hidden_layers: must be a whole number"),
        (RAW, {"num_attention_heads": 0}, "num_attention_heads: must be a whole number"),
        (RAW, {"num_attention_heads": float("inf")}, "at least 1, is Infinity"),
        (RAW, {"num_key_value_heads": 3}, "must divide num_attention_heads=8, is 3"),
        (RAW, {"head_dim": None}, "num_attention_heads: must divide hidden_size=20, is 8"),
        (RAW, {"eos_token_id": ["x"]}, "eos_token_id: must be a token id or a list of them"),
        (RAW, {"rope_parameters": "x"}, "rope_parameters: must be an object"),
        (RAW, {"rope_scaling": [1]}, "rope_scaling: must be an object"),
        (RAW, {"rope_theta": float("nan")}, "rope_theta: must be a finite number of at least 0"),
        (DEEPSEEK, {"n_routed_experts": 0}, "n_routed_experts: must be a whole number"),
        (DEEPSEEK, {"num_experts_per_tok": 257}, "at most the number of experts=256, is 257"),
        (DEEPSEEK, {"first_k_dense_replace": 62}, "at most num_hidden_layers=61, is 62"),
        (DEEPSEEK, {"n_group": 7}, "n_group: must divide the number of experts=256, is 7"),
        (DEEPSEEK, {"topk_group": 9}, "topk_group: must be at most n_group=8, is 9"),
        (DEEPSEEK, {"num_nextn_predict_layers": -1}, "must be a whole number of at least 0, is -1"),
    ],
)
def test_values_that_no_model_can_have_are_refused_with_their_key(raw, change, words):
    with pytest.raises(ValueError) as caught:
        parse_model_shape({**raw, **change})
    assert words in str(caught.value)


JUNK = [None, "", "x", "7", True, -1, 0, 3, 10**12, 0.5, float("nan"), float("inf"), [], [[]], {}]


@pytest.mark.parametrize("raw", [RAW, DEEPSEEK, GLM, QWEN_MOE], ids=lambda r: r["architectures"][0])
def test_no_value_of_any_key_is_met_by_another_error(raw):
    for key in [*raw, "rope_parameters", "eos_token_id"]:
        for value in JUNK:
            try:
                parse_model_shape({**raw, key: value})
            except (ValueError, KeyError) as error:  # as documented
                assert str(error)
