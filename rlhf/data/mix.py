"""Which prompts a step asks: a pure function of seed and step, the same on every rank.

Nothing is stored, so nothing can be lost: a resumed run asks for step n and gets what the
uninterrupted run got.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.config.schema import DataSection
from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import Tokenizer
from rlhf.types import Prompt


@dataclass(frozen=True, slots=True)
class Draw:
    """One prompt of the endless stream: which pass over its domain, which row."""

    epoch: int
    row: int


class EpochOrder:
    """The endless stream over one domain: each row once per epoch."""

    def __init__(self, num_rows: int, seed: str, shuffle: bool) -> None:
        if num_rows < 1:
            raise ValueError(f"a domain must have at least 1 row, has {num_rows}")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._last: tuple[int, list[int]] | None = None

    def draws(self, first: int, num: int, multiple_of: int = 1) -> list[Draw]:
        """Elements [first, first + num) of the stream.

        The last rows of an epoch that don't fill a multiple of ``multiple_of`` are left out of it.
        """
        size = self._num_rows - self._num_rows % multiple_of
        out: list[Draw] = []
        while len(out) < num:
            epoch, start = divmod(first + len(out), size)
            order = self.order(epoch)[:size]
            out += [Draw(epoch, row) for row in order[start : start + num - len(out)]]
        return out

    def order(self, epoch: int) -> list[int]:
        """The permutation of one epoch; the last one is kept, so that a step need not make it."""
        if self._last is None or self._last[0] != epoch:
            rows = list(range(self._num_rows))
            if self._shuffle:
                random.Random(f"{self._seed} epoch {epoch}").shuffle(rows)
            self._last = (epoch, rows)
        return self._last[1]


def allotment(weights: Sequence[float], num: int) -> list[int]:
    """How many of the first ``num`` prompts each domain gets; grows with ``num``, sums to it.

    Webster's rule: prompt j of domain d comes at time (j + 1/2) / weight d, ties in order of
    domains. So every stretch of the stream is as near to the weights as whole numbers allow.
    """
    # what comes up to this time is surely among the first num, and only a few are missing
    start = max(0.0, (num - 2 * len(weights)) / math.fsum(weights))
    counts = [math.floor(start * w + 0.5) for w in weights]
    while sum(counts) < num:
        times = [((counts[d] + 0.5) / w, d) for d, w in enumerate(weights)]
        counts[min(times)[1]] += 1
    return counts


class PromptSource:
    """Prompts of several domains, mixed by weight."""

    def __init__(
        self,
        domains: Sequence[Sequence[Prompt]],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """``drop_last``: rows of an epoch that don't fill a step are left out (one domain only).

        Raises:
            ValueError: a domain is empty, or ``drop_last`` with several domains.
        """
        if drop_last and len(domains) > 1:
            raise ValueError(f"drop_last needs a single domain, there are {len(domains)}")
        self._domains = [list(prompts) for prompts in domains]
        self._weights = list(weights)
        self._seed = seed
        self._drop_last = drop_last
        self._orders = [
            EpochOrder(len(prompts), f"{seed} domain {d}", shuffle)
            for d, prompts in enumerate(self._domains)
        ]

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, domain by domain."""
        return [p for prompts in self._domains for p in prompts]

    def take(self, step: int, num: int) -> list[Prompt]:
        """The ``num`` prompts of a step; every step must ask for the same number.

        Raises:
            ValueError: with ``drop_last``, fewer rows than ``num``.
        """
        before = allotment(self._weights, step * num)
        after = allotment(self._weights, (step + 1) * num)
        out: list[Prompt] = []
        for prompts, order, begin, end in zip(
            self._domains, self._orders, before, after, strict=True
        ):
            if self._drop_last and len(prompts) < num:
                raise ValueError(
                    f"data.drop_last: a step takes {num} prompts, the source has {len(prompts)}; "
                    "lower batch.prompts_per_step or set drop_last to false"
                )
            whole = num if self._drop_last else 1
            out += [prompts[draw.row] for draw in order.draws(begin, end - begin, whole)]
        if len(self._domains) > 1:  # engines take every n-th prompt: spread the domains over them
            random.Random(f"{self._seed} step {step}").shuffle(out)
        return out


def build_prompt_source(data: DataSection, tokenizer: Tokenizer, seed: int) -> PromptSource:
    """The training prompts of a configuration.

    Raises:
        ValueError: a source is faulty or has no usable prompt.
    """
    return PromptSource(
        [load_prompts(source, tokenizer, data.max_prompt_tokens) for source in data.train],
        [source.weight for source in data.train],
        seed=seed,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
    )


def build_eval_prompts(data: DataSection, tokenizer: Tokenizer) -> list[Prompt]:
    """All evaluation prompts, source by source.

    Raises:
        ValueError: a source is faulty or has no usable prompt.
    """
    return [
        prompt
        for source in data.eval
        for prompt in load_prompts(source, tokenizer, data.max_prompt_tokens)
    ]
