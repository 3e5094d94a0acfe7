"""A run goes on with the models of its checkpoint, or is refused before any rank is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.config.faults import ConfigError
from rlhf.config.load import load_text
from rlhf.config.schema import Config
from rlhf.preflight import check
from rlhf.saved import check_same_models, trained_models
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.shapes import make_shape
from tests.helpers.tiny_models import make_tiny
from tests.unit.test_config_check import PPO, SMALL

SHAPE = make_shape("deepseek_v3")


def _config(folder: Path, *settings: str) -> Config:
    return load_text(Config, SMALL, "x", [f"run_dir={folder}", *settings])


def _save(config: Config, models: dict) -> Path:
    place = Path(config.run_dir) / "checkpoints" / "step_00000002"
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps({"steps_done": 2, "models": models}))
    return place


def test_a_run_goes_on_with_its_own_models(tmp_path):
    config = _config(tmp_path, *PPO)
    check_same_models(config, SHAPE, "x")  # nothing saved yet
    _save(config, trained_models(config, SHAPE))
    check_same_models(config, SHAPE, "x")
    check_same_models(config, replace(SHAPE, max_position=7, eos_token_ids=(1, 2)), "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 8}, f"hidden_size: {SHAPE.hidden_size} -> 8"),
        ({"rope_theta": 5.0}, f"rope_theta: {SHAPE.rope_theta} -> 5.0"),
        (
            {"moe": replace(SHAPE.moe, num_experts=2)},
            f"moe.num_experts: {SHAPE.moe.num_experts} -> 2",
        ),
        ({"mla": None}, f"mla.kv_lora_rank: {SHAPE.mla.kv_lora_rank} -> not set"),
    ],
)
def test_another_actor_is_refused_with_both_numbers(tmp_path, change, words):
    config = _config(tmp_path)
    place = _save(config, trained_models(config, SHAPE))
    other = replace(SHAPE, **change)
    with pytest.raises(ConfigError) as error:
        check_same_models(config, other, "x")
    (fault,) = error.value.faults
    assert fault.startswith(f"x:model.path: the actor must be the one that was saved in {place}")
    assert words in fault
    assert fault.endswith("give that model, or another run_dir")
    check_same_models(_config(tmp_path, "checkpoint.resume=never"), other, "x")


def test_another_critic_is_refused_by_its_own_key(tmp_path):
    small = make_tiny(tmp_path / "small", "llama")
    large = make_tiny(tmp_path / "large", "llama", num_hidden_layers=6)
    shape = load_model_shape(small)
    config = _config(tmp_path, *PPO, f"critic.path={small}")
    _save(config, trained_models(config, shape))
    check_same_models(_config(tmp_path, *PPO, f"model.path={small}"), shape, "x")
    with pytest.raises(ConfigError) as error:
        check_same_models(_config(tmp_path, *PPO, f"critic.path={large}"), shape, "x")
    (fault,) = error.value.faults
    assert fault.startswith("x:critic.path: the critic must be")
    assert "num_layers: 4 -> 6" in fault


def test_it_is_part_of_what_is_checked_before_any_rank(tmp_path):
    model = make_tiny(tmp_path / "model", "llama")
    config = _config(tmp_path, f"model.path={model}")
    shape = check(config, 1, "x")
    _save(config, trained_models(config, replace(shape, num_layers=9)))
    with pytest.raises(ConfigError, match="num_layers: 9 -> 4"):
        check(config, 1, "x")
