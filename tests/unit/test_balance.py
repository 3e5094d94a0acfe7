"""The bound on the busiest sender: never above the best possible, and as a rule equal to it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard.balance import least_max_sent


def best_possible(num_bytes, world):
    """Over all sets of ranks: what only they can send, over their number (max flow = min cut)."""
    return max(
        sum(size for ranks, size in num_bytes.items() if set(ranks) <= set(chosen)) / count
        for count in range(1, world + 1)
        for chosen in combinations(range(world), count)
    )


@st.composite
def jobs(draw: st.DrawFn):
    world = draw(st.integers(1, 6))
    senders = st.sets(st.integers(0, world - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    return draw(st.dictionaries(senders, st.integers(0, 1000), max_size=8)), world


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_the_bound_is_the_best_possible(made):
    num_bytes, world = made
    best = best_possible(num_bytes, world)
    assert least_max_sent(num_bytes, world) <= best * (1 + 1e-9)
    assert least_max_sent(num_bytes, world) == pytest.approx(best, rel=1e-3)


def test_single_holders_cannot_be_relieved():
    assert least_max_sent({(0,): 10, (1,): 2, (0, 1): 4}, 2) == 10
    assert least_max_sent({(0,): 10, (1,): 2, (0, 1): 12}, 2) == 12


def test_a_chain_of_choices_evens_out():
    """Each rank can help the next one only."""
    world = 16
    pairs = {(i, i + 1): 0 for i in range(world - 1)} | {(0, 1): 1000}
    assert least_max_sent(pairs, world) == 500
    pairs = {(i, i + 1): 100 * i for i in range(world - 1)}
    expected = max(
        sum(100 * i for i in range(first, last)) / (last - first + 1)
        for first, last in combinations(range(world), 2)
    )
    assert least_max_sent(pairs, world) == pytest.approx(expected, rel=1e-3)


def test_nothing_to_send_is_nothing():
    assert least_max_sent({}, 3) == 0
    assert np.isfinite(least_max_sent({(0, 1): 0}, 2))
