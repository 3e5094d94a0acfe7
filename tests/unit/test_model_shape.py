"""Facts of a model's config.json, and what is said when one is missing."""

from __future__ import annotations

import json

import pytest

from rlhf.weights.model_shape import load_model_shape
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
