"""Layouts written as one word."""

import pytest

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.dist.layout_text import parse_rollout, parse_train, rollout_text


def test_words_become_the_layouts_they_name():
    assert parse_train("tp=8,pp=4,last=13,cp=4,ep=32,etp=1", 128) == TrainLayout(
        128, tp=8, pp=4, last=13, cp=4, ep=32, etp=1
    )
    assert parse_train(" pp = 2, vpp=2 , first=3", 4) == TrainLayout(4, pp=2, vpp=2, first=3)
    assert parse_rollout("tp=64,dp=8,ep=64,a2a=deepep", 128) == RolloutLayout(
        128, tp=64, dp=8, ep=64, a2a="deepep"
    )
    assert parse_train("", 2) == TrainLayout(2)
    assert parse_rollout("pp=2", 2) == RolloutLayout(2, pp=2)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (
            parse_train,
            "tpp=8",
            [r"train\.tpp: is not a key; did you mean tp\?", "etp, first, last"],
        ),
        (parse_train, "dp=8", [r"train\.dp: .*ranks / \(tp \* pp \* cp\)"]),
        (parse_train, "tp=2,tp=4", [r"train\.tp: is given twice, 2 and 4"]),
        (parse_train, "tp=two", [r"train\.tp: must be a whole number of at least 1, is 'two'"]),
        (parse_train, "tp=0", [r"train\.tp: must be a whole number of at least 1, is '0'"]),
        (parse_train, "tp=-1", [r"is '-1'"]),
        (parse_train, "tp", [r"train: 'tp' must read key=value"]),
        (parse_train, "tp=,pp=2", [r"train: 'tp=' must read key=value"]),
        (parse_train, "tp=3", [r"train: world=8 must be a multiple of tp\*pp\*cp=3"]),
        (parse_rollout, "etp=1", [r"rollout\.etp: is not a key", "keys of rollout are tp, dp"]),
        (parse_rollout, "a2a=deepp", [r"rollout\.a2a: must be one of none, deepep.*mean deepep"]),
        (
            parse_rollout,
            "quantization=fp8",
            [r"quantization: must be one of none, block_fp8.*mean"],
        ),
        (parse_rollout, "a2a=deepp,tp=x", [r"rollout\.a2a", r"rollout\.tp"]),
        (parse_rollout, "tp=8,dp=3", [r"rollout\.dp=3 must divide rollout\.tp=8"]),
    ],
)
def test_every_fault_is_named_with_what_to_do(parse, text, expected):
    with pytest.raises(LayoutError) as caught:
        parse(text, 8)
    for pattern in expected:
        caught.match(pattern)


def test_all_faults_come_at_once():
    with pytest.raises(LayoutError) as caught:
        parse_train("tpp=1,pp=2,pp=2,cp", 4)
    assert len(caught.value.faults) == 4


@pytest.mark.parametrize(
    "text",
    ["tp=1", "tp=64,dp=8,ep=64,a2a=deepep", "tp=4,ep=2,pp=2", "tp=8,ep=8,redundant_experts=8"],
)
def test_a_layout_is_written_as_it_is_read(text):
    assert rollout_text(parse_rollout(text, 64)) == text
