"""A configuration is read as written, or refused with every fault named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config.faults import ConfigError
from rlhf.config.load import dump_config, load_config, load_text
from rlhf.config.schema import Config
from rlhf.config.yaml_text import dump_yaml, parse_yaml

SMALL = """
run_dir: runs/small
num_steps: 4
model: {path: models/small, dtype: float32}
data:
  train:
    - {type: reasoning_gym, name: sums, task: chain_sum, held_out: 8, reward: exact_match}
    - {type: jsonl, name: rows, path: rows.jsonl, weight: 2}
batch: {prompts_per_step: 4, samples_per_prompt: 4}
optimizer: {lr: 1e-6}
"""


def load(text: str = SMALL, *overrides: str) -> Config:
    return load_text(Config, text, "small.yaml", overrides)


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return caught.value.faults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("5E-7", 5e-7),
        ("2e-1", 0.2),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("10", 10),
        ("1_000", 1000),
        ("off", "off"),
        ("yes", "yes"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
    ],
)
def test_scalars_mean_what_they_look_like(text, value):
    parsed, _ = parse_yaml(f"key: {text}")
    assert parsed == {"key": value}
    assert type(parsed["key"]) is type(value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]))
    | st.sampled_from(["1e-6", "off", "010", "null", "<<", "=", "", "1:30", ".5", "- x"])
)


@given(st.dictionaries(st.text("abc_", min_size=1), scalars | st.lists(scalars)))
def test_yaml_round_trip(value):
    assert parse_yaml(dump_yaml(value)) == (value, [])


def test_repeated_keys_are_named_with_both_lines_but_merges_are_not_repeats():
    _, repeated = parse_yaml("a:\n  lr: 1\n  lr: 2\nb: &b {c: 1}\nd: {<<: *b, c: 2}\n")
    assert repeated == ["a.lr: must appear once, is on lines 2 and 3; remove one"]


@pytest.mark.parametrize(
    "text", ["a: [", "a: *x", "a: !!python/object:os.x {}", "{[1]: 2}", "\x00", "[" * 3000]
)
def test_what_is_not_yaml_is_refused_by_its_place(text):
    assert faults(text)[0].startswith("small.yaml:")


def test_resolved_config_loads_back_equal():
    config = load(SMALL, "algorithm.kl={place: loss, coef: 1e-3}", "data.train.0.params={a: [1]}")
    assert load(dump_config(config)) == config


def test_all_faults_are_reported_at_once_each_with_its_path_and_a_hint():
    text = SMALL.replace("optimizer: {lr: 1e-6}", "optimizer: {lr: -1, leraning_rate: 1}")
    text = text.replace("type: jsonl,", "type: jsonll,").replace("num_steps: 4", "num_stepz: 4")
    text = text.replace("held_out: 8", "hold_out: 8").replace("task: chain_sum, ", "")
    found = faults(text + "train: {temperature: 1, tp: two}\nalgorithm: {aggregation: token_mean}")
    expected = [
        ("num_steps", "must be given"),
        ("num_stepz", "did you mean num_steps?"),
        ("optimizer.lr", "must be greater than 0, is -1"),
        ("optimizer.leraning_rate", "unknown key"),
        ("data.train.1.type", "did you mean jsonl?"),
        ("data.train.0.hold_out", "did you mean held_out?"),
        ("data.train.0.task", "must be given (Registered task"),
        ("train.temperature", "did you mean rollout.sampling.temperature?"),
        ("train.tp", "must be a valid integer"),
        ("algorithm.aggregation", "did you mean token-mean?"),
    ]
    for path, words in expected:
        assert [f for f in found if f.startswith(f"small.yaml:{path}: ") and words in f], path
    assert len(found) == len(expected)


def test_overrides_are_typed_like_the_file_and_blamed_as_overrides():
    config = load(SMALL, "optimizer.lr=5e-7", "train.sequence_parallel=true", "track.swanlab=off")
    assert config.optimizer.lr == 5e-7
    assert config.train.sequence_parallel is True
    assert config.track.swanlab == "off"
    assert load(SMALL, "data.train.1.weight=3").data.train[1].weight == 3
    assert load(SMALL, "track.console=false").track.console is False
    found = faults(SMALL, "optimizer.lrr=1", "seed", "seed.x=1", "data.train.9.weight=1", "a=[")
    for words in (
        "override:optimizer.lrr: unknown key; did you mean lr?",
        "override 'seed': must look like",
        "override:seed: ",
        "data.train is a list of 2",
        "override 'a=[': ",
    ):
        assert [f for f in found if words in f], words


def test_an_override_that_undoes_another_is_refused_with_both_named():
    (fault,) = faults(SMALL, "seed=1", "optimizer.lr=1", "seed=2")
    assert fault == "override 'seed=2': undoes 'seed=1'; give one of them"
    (fault,) = faults(SMALL, "train.tp=2", "train={pp: 2}")
    assert "'train={pp: 2}': undoes 'train.tp=2'" in fault
    assert load(SMALL, "train={pp: 2}", "train.tp=2").train.tp == 2


def test_truth_values_are_not_numbers():
    assert "num_steps: must be a number" in faults(SMALL, "num_steps=true")[0]


def test_a_missing_file_or_folder_is_a_fault_not_a_traceback(tmp_path: Path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(path)
