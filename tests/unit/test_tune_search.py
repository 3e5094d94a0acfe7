"""Out of noisy times the right value is picked, and none where there is nothing to gain."""

from __future__ import annotations

import random

import pytest

from rlhf.tune.search import (
    best,
    compare,
    next_values,
    round_order,
    survivors,
)

TRUE = {64.0: 1.0, 16.0: 1.3, 32.0: 1.1, 128.0: 0.85, 256.0: 0.95}


def measured(true, rounds, noise, seed, disturbed=0.0):
    """Seconds of every value in every round; in some rounds the whole machine is slower."""
    rng = random.Random(seed)
    out = {value: [] for value in true}
    for _ in range(rounds):
        slow = 3.0 if rng.random() < disturbed else 1.0
        for value, seconds in true.items():
            out[value].append(seconds * slow * (1 + noise * rng.random()))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_wins_though_rounds_are_disturbed_as_a_whole(seed):
    times = measured(TRUE, rounds=8, noise=0.06, seed=seed, disturbed=0.4)
    assert best(times, 64.0).value == 128.0


@pytest.mark.parametrize("seed", range(20))
def test_equal_values_leave_the_configuration_as_it_is(seed):
    """Four others each time, and none of them may win by luck."""
    times = measured(dict.fromkeys(TRUE, 1.0), rounds=10, noise=0.1, seed=seed)
    assert best(times, 64.0).value == 64.0


def test_one_lucky_round_is_no_win_and_neither_are_two_rounds():
    assert best({1.0: [1.0, 1.0, 1.0], 2.0: [0.1, 1.0, 1.05]}, 1.0).value == 1.0
    assert best({1.0: [1.0, 1.0], 2.0: [0.5, 0.5]}, 1.0).value == 1.0
    assert best({1.0: [1.0] * 3, 2.0: [0.5] * 3}, 1.0).value == 2.0
    assert best({1.0: [1.0] * 3, 2.0: [0.99] * 3}, 1.0).value == 1.0, "not worth a change"


def test_the_error_of_a_ratio_falls_with_the_rounds():
    few, many = (
        next(
            c.error
            for c in compare(measured({1.0: 1.0, 2.0: 1.0}, n, 0.3, 1), 1.0)
            if c.value == 2.0
        )
        for n in (8, 128)
    )
    assert many < few / 2


def test_the_worse_half_is_given_up_and_the_current_value_never():
    times = {value: [seconds] for value, seconds in TRUE.items()}
    assert survivors(times, 64.0) == [64.0, 128.0, 256.0]
    assert survivors(times, 16.0) == [16.0, 128.0, 256.0]


def test_rungs_halve_down_to_two_and_the_best_lives():
    times = {value: [] for value in TRUE}
    counts = []
    for number in range(10):
        alive = next_values(times, 64.0, number)
        counts.append(len(alive))
        for value in round_order(alive, number):
            times[value].append(TRUE[value])
    assert counts == [5, 5, 3, 3, 2, 2, 2, 2, 2, 2]
    assert len(times[128.0]) == len(times[64.0]) == 10
    assert best(times, 64.0).value == 128.0


def test_every_value_is_first_as_often_as_another_and_before_as_often_as_behind():
    values = [1.0, 2.0, 3.0]
    orders = [round_order(values, number) for number in range(6)]
    assert all(sorted(order) == values for order in orders)
    assert sorted(order[0] for order in orders) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    before = sum(order.index(1.0) < order.index(2.0) for order in orders)
    assert before == 3


def test_the_current_value_must_have_been_measured():
    with pytest.raises(ValueError, match="the current value 5 must be measured"):
        compare({1.0: [1.0]}, 5.0)
