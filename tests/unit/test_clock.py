"""Every second of a rank has one cause, and no more and no fewer seconds are told than passed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.dist.clock import Cause, Clock, cause_of
from rlhf.types import Phase

TREES = st.recursive(
    st.tuples(st.sampled_from(Cause), st.integers(0, 9), st.just([])),
    lambda children: st.tuples(st.sampled_from(Cause), st.integers(0, 9), st.lists(children)),
    max_leaves=12,
)


class Time:
    """Exact, and only moved by the test."""

    def __init__(self) -> None:
        self.at = Fraction(0)

    def __call__(self) -> Fraction:
        return self.at


def live(clock: Clock, time: Time, tree, told: dict) -> None:
    cause, seconds, inner = tree
    with clock.spend(cause):
        time.at += seconds
        told[cause] = told.get(cause, 0) + seconds
        for child in inner:
            live(clock, time, child, told)


@given(st.lists(TREES, max_size=4), st.integers(0, 5))
def test_seconds_go_to_the_innermost_cause_and_sum_to_the_wall(trees, between):
    time = Time()
    clock = Clock(time)
    told: dict = {}
    for tree in trees:
        live(clock, time, tree, told)
        time.at += between
        told[Cause.OTHER] = told.get(Cause.OTHER, 0) + between
    account = clock.take()
    assert {c: s for c, s in account.seconds.items() if s} == {c: s for c, s in told.items() if s}
    assert sum(account.seconds.values()) == account.wall_s == time.at


def test_what_is_taken_inside_a_body_ends_there_and_goes_on_from_there():
    time = Time()
    clock = Clock(time)
    with clock.spend(Cause.TRAIN):
        time.at += 3
        first = clock.take()
        time.at += 4
    second = clock.take()
    assert first.seconds[Cause.TRAIN] == first.wall_s == 3
    assert second.seconds[Cause.TRAIN] == second.wall_s == 4


def test_moved_seconds_leave_the_sum_as_it_is_even_while_their_cause_still_runs():
    time = Time()
    clock = Clock(time)
    with clock.spend(Cause.TRAIN):
        time.at += 5
        clock.move(Cause.TRAIN, Cause.PIPELINE, 2)
    account = clock.take()
    assert (account.seconds[Cause.TRAIN], account.seconds[Cause.PIPELINE]) == (3, 2)
    assert sum(account.seconds.values()) == account.wall_s == 5


def test_a_body_that_fails_gives_the_clock_back():
    time = Time()
    clock = Clock(time)
    with pytest.raises(KeyError), clock.spend(Cause.SAVE):
        raise KeyError
    time.at += 1
    assert clock.take().seconds[Cause.OTHER] == 1


def test_every_phase_has_a_cause():
    assert {cause_of(phase) for phase in Phase} <= set(Cause)
