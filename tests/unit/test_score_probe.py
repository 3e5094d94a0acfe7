"""The probe: its prompt, its distance, and what an alarm does."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from rlhf.config.schema import ReshardSection
from rlhf.rollout.engine import Completion
from rlhf.rollout.score_probe import ScoreProbe, probe_batch, probe_tokens
from rlhf.types import Status

TOKENS = (5, 6, 7)


class Served:
    """An engine that gives these log-probabilities to any prompt."""

    def __init__(self, logprobs):
        self.logprobs = logprobs
        self.asked = []

    def generate(self, requests, on_completion, timeout_s):
        self.asked += requests
        return [Completion(0, [1], [0.0], Status.LENGTH, 0, None, self.logprobs)]


def _probe(trained, served, **settings):
    gaps = []
    probe = ScoreProbe(
        token_ids=TOKENS,
        score=lambda: torch.tensor([0.0, *trained, 0.0]),  # with a padded place
        engine=Served(served),
        config=ReshardSection(**settings),
        on_gap=gaps.append,
    )
    return probe, gaps


def test_the_prompt_depends_on_the_seed_and_is_in_the_vocabulary():
    assert probe_tokens(0, 64, 50) == probe_tokens(0, 64, 50)
    assert probe_tokens(0, 64, 50) != probe_tokens(1, 64, 50)
    assert set(probe_tokens(3, 2000, 50)) == set(range(50))
    assert probe_tokens(0, 8, 50) == probe_tokens(0, 64, 50)[:8]
    assert probe_tokens(0, 0, 50) == ()


@pytest.mark.parametrize("align,length", [(1, 3), (4, 4), (2, 4)])
def test_the_batch_asks_for_every_token_but_the_first(align, length):
    micros = probe_batch(TOKENS, align, 2, torch.device("cpu"))
    assert len(micros) == 2
    for micro in micros:
        assert micro.tokens.tolist() == [*TOKENS, *[0] * (length - 3)]
        assert micro.mask.tolist() == [False, True, True, *[False] * (length - 3)]
        assert micro.cu_seqlens.tolist() == [0, length]


def test_the_gap_is_the_distance_of_the_two():
    probe, gaps = _probe([-1.0, -2.0], [-1.25, -1.75], probe_alarm=0.3)
    probe.score_trained()
    probe.compare(4, 1.0)
    (gap,) = gaps
    assert (gap.mean, gap.max, gap.num_tokens, gap.alarm) == (0.25, 0.25, 2, False)


def test_the_engine_is_asked_once_after_each_scoring():
    probe, gaps = _probe([-1.0, -2.0], [-1.0, -2.0])
    probe.compare(0, 1.0)
    probe.score_trained()
    probe.compare(0, 1.0)
    probe.compare(1, 1.0)
    assert len(gaps) == 1
    (request,) = probe._engine.asked
    assert request.token_ids == TOKENS
    assert request.prompt_logprobs


@pytest.mark.parametrize("served", [[-1.0, -2.3], [-1.0, math.nan]])
def test_a_gap_above_the_alarm_is_a_line_and_a_flag(served, caplog):
    probe, gaps = _probe([-1.0, -2.0], served)
    probe.score_trained()
    with caplog.at_level(logging.WARNING):
        probe.compare(4, 1.0)
    assert gaps[0].alarm
    (record,) = caplog.records
    assert "step 4" in record.getMessage()
    assert "reshard.probe_alarm=0.1" in record.getMessage()


def test_the_run_stops_if_it_shall():
    probe, gaps = _probe([-1.0, -2.0], [-1.0, -2.3], probe_stop=True)
    probe.score_trained()
    with pytest.raises(RuntimeError, match=r"step 4: .*0\.15 apart on average, 0\.3 at most"):
        probe.compare(4, 1.0)
    assert gaps[0].alarm


def test_without_tokens_nobody_is_asked():
    probe = ScoreProbe(
        token_ids=(),
        score=lambda: pytest.fail("scored"),
        engine=Served([]),
        config=ReshardSection(probe_tokens=0),
        on_gap=lambda gap: pytest.fail("compared"),
    )
    probe.score_trained()
    probe.compare(0, 1.0)
