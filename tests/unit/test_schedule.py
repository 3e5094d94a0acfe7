"""The learning rate follows its closed form."""

from __future__ import annotations

import math

import pytest

from rlhf.config.schema import OptimizerSection
from rlhf.mcore.schedule import learning_rate


def _all(total, **settings):
    cfg = OptimizerSection(lr=1.0, **settings)
    return [learning_rate(cfg, update, total) for update in range(total)]


def test_warm_up_rises_evenly_and_ends_at_lr():
    assert _all(6, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_min_lr():
    assert _all(5, decay="linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_is_half_way_in_the_middle_and_ends_at_min_lr():
    rates = _all(7, decay="cosine", min_lr=0.5, warmup_steps=2)
    expected = [0.5 + 0.25 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert rates == pytest.approx([1 / 3, 2 / 3, *expected])
    assert rates[4] == pytest.approx(0.75)
    assert rates[-1] == pytest.approx(0.5)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_updates_beyond_the_plan_keep_the_last_rate(decay):
    cfg = OptimizerSection(lr=1.0, min_lr=0.1, decay=decay)
    assert learning_rate(cfg, 30, 10) == learning_rate(cfg, 9, 10)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_a_single_update_has_lr(decay):
    assert _all(1, decay=decay) == [1.0]
