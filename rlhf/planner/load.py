"""What a step has to do, and what a phase of it takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts and answers of one step. Tokens are means unless they say otherwise."""

    prompts: int
    samples: int  # of each prompt
    prompt_tokens: float
    answer_tokens: float
    longest_answer_tokens: float
    microbatch_tokens: int  # budget of one packed pass, of all context parallel ranks together
    concurrency: int  # answers that an engine decodes at a time, at most
    updates: int = 1
    save_every: int = 0  # steps; 0: none counted

    def __post_init__(self) -> None:
        faults = [
            f"{name}: must be above 0, is {value}"
            for name in ("prompts", "samples", "microbatch_tokens", "concurrency", "updates")
            if (value := getattr(self, name)) < 1
        ]
        if not 0 <= self.prompt_tokens < math.inf:
            faults.append(f"prompt_tokens: must be at least 0, is {self.prompt_tokens:g}")
        if not 0 < self.answer_tokens <= self.longest_answer_tokens:
            faults.append(
                f"answer_tokens: must be above 0 and at most the longest answer of "
                f"{self.longest_answer_tokens:g}, is {self.answer_tokens:g}"
            )
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def answers(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Prompts and answers, as training sees them."""
        return self.answers * self.sequence_tokens

    @property
    def sequence_tokens(self) -> float:
        """Of a prompt with its answer."""
        return self.prompt_tokens + self.answer_tokens

    def alive(self, at: float) -> float:
        """Share of answers that are longer than ``at`` times the longest one.

        ``(1 - at) ** k`` with the k that gives the mean: many short answers and few long ones where
        the mean is far below the longest, none shorter than another where it is equal.
        """
        return float((1.0 - at) ** (self.longest_answer_tokens / self.answer_tokens - 1))

    @property
    def seen_tokens(self) -> float:
        """Length of the sequence that a token is in, in the mean over tokens: E[l^2] / E[l]."""
        k = self.longest_answer_tokens / self.answer_tokens - 1
        square = 2 * self.longest_answer_tokens**2 / ((k + 1) * (k + 2))
        prompt = self.prompt_tokens
        return (prompt**2 + 2 * prompt * self.answer_tokens + square) / self.sequence_tokens


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of a phase by cause; they add up."""

    parts: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda name: self.parts[name])
