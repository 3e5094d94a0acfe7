"""A loop, and the folders of value models, are looked at before any rank is started."""

from __future__ import annotations

import json

import pytest

from rlhf.config.check import train_layout
from rlhf.config.faults import ConfigError
from rlhf.config.load import load_text
from rlhf.config.schema import Config
from rlhf.dist.layout import TrainLayout
from rlhf.preflight import (
    check_engine_keys,
    check_loop,
    check_quantization,
    check_value_models,
    notes,
)
from rlhf.weights.find_model import find_config
from rlhf.weights.model_shape import load_model_shape, read_model_config
from rlhf.weights.value_model import value_model_shape
from tests.helpers.shapes import make_shape
from tests.helpers.tiny_models import make_tiny, make_tiny_classifier
from tests.unit.test_config_check import PPO, SMALL

LOOP = """
import megatron_of_another_machine
from elsewhere import borrowed

def train(run): ...

if True:
    other = train
"""


def test_a_loop_is_found_without_being_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(LOOP)
    for name in ("train", "borrowed", "other"):
        check_loop(f"{file}:{name}")
    check_loop("rlhf.loop:train")
    file.write_text("from elsewhere import *")
    check_loop(f"{file}:anything")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mine.py", "write FILE.py:FUNCTION"),
        ("none.py:train", "no file .*none.py"),
        ("rlhf.lop:train", "no module rlhf.lop"),
        ("no_such_package.loop:train", "no module no_such_package.loop"),
        ("rlhf.loop:tran", "loop.py defines no function 'tran'"),
        ("mine.py:tran", "mine.py defines no function 'tran'"),
        ("torn.py:train", "torn.py is not Python"),
    ],
)
def test_a_loop_that_is_not_there_is_named(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOOP)
    (tmp_path / "torn.py").write_text("def train(")
    with pytest.raises(ValueError, match=f"--loop {spec}: .*{words}"):
        check_loop(spec)


def test_what_a_checkpoint_has_beside_the_model_is_said():
    assert notes(make_shape("deepseek_v3")) == []
    (note,) = notes(make_shape("deepseek_v3", num_nextn_predict_layers=1))
    assert note.startswith("num_nextn_predict_layers=1: ")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reward_model.path={causal}"], ["reward_model.path: ", "must be a sequence classifier"]),
        (["reward_model.path={other}"], ["reward_model.path: ", "vocabulary of 300", "of 512"]),
        (["critic.path={other}"], ["critic.path: ", "vocabulary of 300", "of 512"]),
        (["critic.path=nowhere"], ["critic.path: ", "nowhere", "no config.json"]),
        (["reward_model.path={short}"], ["reward_model.path: ", "16 positions", "are 72"]),
        (["reward_model.path={classifier}", "train.pp=8"], ["reward_model.path: ", "4"]),
        (
            ["critic.path={experts}", "train.pp=1", "train.tp=2"],
            ["critic.path: ", "train.sequence_parallel: must be true"],
        ),
        (
            ["critic.path={classifier}", "train.vpp=3"],
            ["critic.path: ", "train.vpp=3 must divide the layers of every stage"],
        ),
    ],
)
def test_a_value_model_that_cannot_run_beside_the_actor_is_refused(overrides, words, tmp_path):
    folders = {
        "causal": make_tiny(tmp_path / "causal", "llama"),
        "classifier": make_tiny_classifier(tmp_path / "classifier", "llama"),
        "other": make_tiny_classifier(tmp_path / "other", "llama", vocab_size=300),
        "experts": make_tiny(tmp_path / "experts", "qwen3_moe"),
        "short": make_tiny_classifier(tmp_path / "short", "llama", max_position_embeddings=16),
    }
    settings = [*PPO, *(o.format(**folders) for o in overrides)]
    config = load_text(Config, SMALL, "x", settings)
    layout = train_layout(config.train, config.train.pp * config.train.tp)
    actor = load_model_shape(folders["causal"])
    with pytest.raises(ConfigError) as error:
        check_value_models(config, actor, layout)
    assert all(word in str(error.value) for word in words), error.value


def test_a_critic_from_a_language_model_or_a_classifier_may_run(tmp_path):
    causal = make_tiny(tmp_path / "causal", "llama")
    classifier = make_tiny_classifier(tmp_path / "classifier", "qwen3")  # another family, even
    actor = load_model_shape(causal)
    for folder in (causal, classifier):
        settings = [*PPO, f"critic.path={folder}", f"reward_model.path={classifier}"]
        check_value_models(load_text(Config, SMALL, "x", settings), actor, TrainLayout(2, tp=2))


def test_block_fp8_needs_a_gpu():
    fp8 = load_text(Config, SMALL, "small.yaml", ["rollout.quantization=block_fp8"])
    with pytest.raises(ConfigError, match=r"rollout\.quantization: must be none on a machine"):
        check_quantization(fp8, False)
    check_quantization(fp8, True)
    check_quantization(load_text(Config, SMALL, "small.yaml", []), False)


@pytest.mark.parametrize("key", ["moe_layer_freq", "topk_method", "scoring_func"])
def test_keys_that_only_the_engine_reads_must_be_there(key, tmp_path):
    file = find_config("moonlight-16b")
    shape, raw = read_model_config(file), json.loads(file.read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_engine_keys(str(tmp_path), shape)
    value = raw.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_shape(tmp_path) == shape
    with pytest.raises(ConfigError) as caught:
        check_engine_keys(str(tmp_path), shape, "a.yaml")
    (fault,) = caught.value.faults
    assert fault.startswith(f"a.yaml:model.path: {tmp_path}/config.json: must have {key}")
    assert fault.endswith(f'add "{key}": {json.dumps(value)}')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must hold a JSON object, holds a list"),
        ("{", "must hold a JSON object"),
        ('{"architectures": 5}', "architectures: must be a list of names, is 5"),
    ],
)
def test_a_critic_whose_file_is_no_model_is_named(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        value_model_shape(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)
