"""Routes as the engine sends them, and how many tokens took each expert."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from rlhf.recorder import expert_metrics
from rlhf.rollout.collect import sum_of
from rlhf.rollout.engine import RoutedLayers
from rlhf.rollout.routes import decode_routes, expert_loads

LAYERS = RoutedLayers(first=1, stop=3, experts_per_token=2)


def test_layers_without_experts_are_left_out() -> None:
    sent = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    routes = decode_routes(base64.b64encode(sent.tobytes()).decode(), LAYERS)
    assert routes.dtype == np.int16
    assert (routes == sent[:, 1:]).all()


def test_routes_of_another_model_are_refused() -> None:
    text = base64.b64encode(np.zeros(8, np.int32).tobytes()).decode()
    with pytest.raises(ValueError, match="8 numbers, no multiple of 3 layers"):
        decode_routes(text, LAYERS)


def test_loads_count_every_token_once_per_choice() -> None:
    routes = np.array([[[0, 1], [2, 3]], [[0, 3], [3, 1]]], np.int16)
    loads = expert_loads(routes, num_experts=5)
    assert loads.tolist() == [[2, 1, 0, 1, 0], [0, 1, 1, 2, 0]]
    total = sum_of([None, loads, loads])
    assert total is not None
    assert (total == 2 * loads).all()
    assert sum_of([None]) is None


def test_an_even_load_has_no_excess_and_an_idle_expert_shows() -> None:
    even = {name: m.value for name, m in expert_metrics(np.full((2, 4), 3), None).items()}
    assert even == {"experts/rollout_max_over_mean": 1.0, "experts/rollout_unused": 0.0}
    loads = np.array([[3, 3, 3, 3], [6, 6, 0, 0]])
    skewed = {name: m.value for name, m in expert_metrics(loads, None).items()}
    assert skewed == {"experts/rollout_max_over_mean": 2.0, "experts/rollout_unused": 0.25}
    assert expert_metrics(None, None) == expert_metrics(np.zeros((1, 2)), np.zeros((0, 0))) == {}


def test_the_distance_of_loads_is_the_share_of_tokens_elsewhere() -> None:
    """Whatever the number of tokens; in the mean over layers."""
    rollout, trained = np.array([[4, 4], [1, 3]]), np.array([[20, 20], [30, 10]])
    got = {name: m.value for name, m in expert_metrics(rollout, trained).items()}
    assert got["experts/distance"] == 0.25
    assert got["experts/train_max_over_mean"] == 1.5
