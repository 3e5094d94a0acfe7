"""Every case holds: faults that other systems met cannot happen here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cases.compare import compare
from tests.cases.ops import BEHAVIOUR, OPS, WAITING

FILE = Path(__file__).parent / "public.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").split("\n") if line]
MAPPED = [case for case in CASES if case["input"]["op"] in OPS]
PROVEN = set(OPS) | {op for op, _ in BEHAVIOUR}
UNMAPPED = {case["input"]["op"] for case in CASES} - PROVEN


@pytest.mark.parametrize("case", MAPPED, ids=[case["id"] for case in MAPPED])
def test_case_holds(case):
    try:
        result = OPS[case["input"]["op"]](case["input"])
    except (ValueError, RuntimeError) as error:  # a refusal; anything else is a defect
        result = error
    op = case["input"]["op"]
    asked = {key: want for key, want in case["expected"].items() if (op, key) not in BEHAVIOUR}
    assert compare({**case, "expected": asked}, result) == [], case["note"]


@pytest.mark.parametrize("test", sorted(set(BEHAVIOUR.values())))
def test_every_behaviour_is_proven_by_a_test_that_exists(test):
    file, name = test.split("::")
    text = (FILE.parents[2] / file).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in text


def test_every_unmapped_operation_says_what_it_waits_for():
    waiting = [op for ops in WAITING.values() for op in ops]
    assert len(waiting) == len(set(waiting))
    assert set(waiting) == UNMAPPED
