"""What a schedule does between its computations is waiting, however it receives."""

from __future__ import annotations

import pytest

from rlhf.mcore.stage_waits import StageWaits


class Event:
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def elapsed_time(self, other: Event) -> float:
        return (other.at_s - self.at_s) * 1e3


class Script:
    """Plays megatron: ``name+`` starts a timer, ``name-`` stops it, each at its second."""

    def __init__(self, num_stages: int = 2) -> None:
        self.at_s = 0.0
        self.waits = StageWaits(num_stages, lambda: Event(self.at_s))

    def play(self, *marks: tuple[float, str]) -> float:
        for self.at_s, mark in marks:
            watch = self.waits(mark[:-1], log_level=1)
            if mark[-1] == "+":
                watch.start(barrier=True)
            else:
                watch.stop()
        return self.waits.take_s()


PASS = [
    (0.0, "forward-backward+"),
    (0.1, "forward-recv+"),  # of no account: receives may overlap
    (1.0, "forward-recv-"),
    (1.0, "forward-compute+"),
    (3.0, "forward-compute-"),
    (7.0, "backward-compute+"),
    (8.0, "backward-compute-"),
]


def test_gaps_between_computations_are_waits_and_reductions_are_not():
    marks = [
        *PASS,
        (8.5, "all-grads-sync+"),
        (20.0, "all-grads-sync-"),
        (21.0, "embedding-grads-all-reduce+"),
        (24.0, "embedding-grads-all-reduce-"),
        (30.0, "forward-backward-"),
    ]
    assert Script().play(*marks) == pytest.approx(1 + 4 + 0.5 + 3)
    assert Script(num_stages=1).play(*marks) == 0


def test_a_pass_without_gradients_ends_with_its_schedule():
    marks = [*PASS[:5], (4.0, "forward-backward-"), (9.0, "forward-backward+")]
    script = Script()
    assert script.play(*marks) == pytest.approx(1 + 1)
    assert script.play() == 0, "what has been told is not told again, nor is an open wait"


def test_our_own_exchanges_count_too():
    script = Script()
    with script.waits.waiting():
        script.at_s = 2.5
    assert script.play() == pytest.approx(2.5)
