"""Rules that compare the text with the expected answer."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

from rlhf.types import Prompt, Score, Trajectory

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)[-+]?\.\d+")
"""Decimal numbers, with commas between thousands; the sign counts unless it follows a value."""


class ExactMatch:
    """1 if the stripped text equals the stripped answer, else 0."""

    name = "exact_match"

    def check(self, prompt: Prompt) -> None:
        if not prompt.answer.strip():
            raise ValueError("the expected answer must not be empty")

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score:
        value = float(text.strip() == prompt.answer.strip())
        return Score(value, {"correct": value})


class NumberMatch:
    """1 if the first (or last) number of the text equals the answer's value, else 0."""

    def __init__(self, which: Literal["first", "last"]) -> None:
        self.name = f"{which}_number"
        self._index = 0 if which == "first" else -1

    def check(self, prompt: Prompt) -> None:
        if len(numbers(prompt.answer)) != 1:
            raise ValueError(f"the expected answer must be one number, is {prompt.answer!r}")

    def score(self, prompt: Prompt, text: str, trajectory: Trajectory) -> Score:
        found = numbers(text)
        value = float(bool(found) and found[self._index] == numbers(prompt.answer)[0])
        return Score(value, {"correct": value, "has_number": float(bool(found))})


def numbers(text: str) -> list[Fraction]:
    """The numbers in a text, exactly: ``-1,204`` is -1204, ``5-2`` holds 5 and 2."""
    plain = text.replace("\u2212", "-")
    return [Fraction(found.replace(",", "")) for found in NUMBER.findall(plain)]
