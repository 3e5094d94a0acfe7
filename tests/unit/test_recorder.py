"""A step's metrics are those of all its answers."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rlhf.recorder import rollout_metrics
from rlhf.track.metrics import values
from tests.unit.test_algorithms import facts


def test_entropy_counts_every_sampled_token_also_of_groups_without_signal():
    without_signal = facts(1, 1)
    short, long = facts(0, 1)
    mixed = [
        dataclasses.replace(short, num_trained_tokens=1, logprob_sum=-3.0),
        dataclasses.replace(long, num_trained_tokens=5, logprob_sum=-2.0),
    ]
    metrics = values(rollout_metrics([*without_signal, *mixed]))
    assert metrics["rollout/entropy"] == pytest.approx((1 + 1 + 3 + 2) / (2 + 2 + 1 + 5))
    empty = [dataclasses.replace(f, num_trained_tokens=0, logprob_sum=0.0) for f in mixed]
    assert math.isfinite(values(rollout_metrics([*empty, *without_signal]))["rollout/entropy"])
    assert "rollout/entropy" not in values(rollout_metrics(empty))
