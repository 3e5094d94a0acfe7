"""A changed key is named with both values, whatever its place."""

from __future__ import annotations

from rlhf.config.changes import changed_keys


def test_equal_configurations_have_no_changes():
    config = {"seed": 0, "data": {"train": [{"name": "a"}], "eval": []}, "kl": {"coef": None}}
    assert changed_keys(config, config) == []


def test_changed_new_and_absent_keys_are_named_with_both_values():
    before = {"seed": 0, "optimizer": {"lr": 1e-6}, "data": {"train": [{"name": "a"}], "eval": []}}
    after = {
        "seed": 1,
        "optimizer": {"lr": 1e-6, "eps": 1e-8},
        "data": {"train": [{"name": "b"}], "eval": [{"name": "c"}]},
    }
    assert changed_keys(before, after) == [
        "seed: 0 -> 1",
        "data.train.0.name: a -> b",
        "data.eval: [] -> not set",
        "optimizer.eps: not set -> 1e-08",
        "data.eval.0.name: not set -> c",
    ]
