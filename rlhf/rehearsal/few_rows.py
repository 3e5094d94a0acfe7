"""A few short rows of each data source, or of a stand-in, as files: what a rehearsal asks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rlhf.config.schema import DataSection, JsonlSource, ReasoningGymSource
from rlhf.data.jsonl import read_jsonl
from rlhf.data.prompts import load_prompts
from rlhf.data.tokenizer import Tokenizer
from rlhf.rehearsal import stand_in

LOOKED_AT = 256
"""Rows of a source, from its start."""
TRAINED, HELD_OUT = 16, 4
"""Rows that are kept, the shortest."""
NO_LIMIT = 2**40


@dataclass(frozen=True, slots=True)
class FewRows:
    """The section to use, and per source what a person should know of it."""

    data: DataSection
    notes: tuple[str, ...]


def take_few(data: DataSection, tokenizer: Tokenizer, folder: Path, *, own_tokens: bool) -> FewRows:
    """Write the shortest rows of each file into ``folder``; a stand-in where there is no file.

    Args:
        own_tokens: ``tokenizer`` is the model's own, so ``data.max_prompt_tokens`` holds for it.

    Raises:
        ValueError: a source is faulty, or none of the rows looked at fits.
    """
    limit = data.max_prompt_tokens if own_tokens else NO_LIMIT
    absent = {s.name for s in (*data.train, *data.eval) if _is_absent(s)}
    taker = _Taker(tokenizer, folder, limit, absent, [])
    train = tuple(taker.take(f"train.{i}", s, TRAINED) for i, s in enumerate(data.train))
    held_out = tuple(taker.take(f"eval.{i}", s, HELD_OUT) for i, s in enumerate(data.eval))
    longest = max(taker.longest(source) for source in (*train, *held_out))
    values = {"train": train, "eval": held_out, "max_prompt_tokens": longest}
    return FewRows(data.model_copy(update=values), tuple(taker.notes))


@dataclass
class _Taker:
    tokenizer: Tokenizer
    folder: Path
    limit: int  # tokens of a prompt
    absent: set[str]  # domains; a domain has one reward in training and evaluation
    notes: list[str]

    def take(
        self, key: str, source: JsonlSource | ReasoningGymSource, num: int
    ) -> JsonlSource | ReasoningGymSource:
        target = self.folder / f"{key}.jsonl"
        if source.name in self.absent:
            what = source.path if isinstance(source, JsonlSource) else source.task
            self.notes.append(
                f"data.{key}: {what} is not here: {num} sums and a reward without meaning stand in "
                f"for it and for {source.reward}"
            )
            return self._stand_in(source, target, num)
        if isinstance(source, ReasoningGymSource):
            few = {"size": min(source.size, LOOKED_AT), "held_out": min(source.held_out, HELD_OUT)}
            return source.model_copy(update=few)
        return self._shortest(source, target, num)

    def longest(self, source: JsonlSource | ReasoningGymSource) -> int:
        """Tokens of its longest prompt that fits; the limit is not one of stand-ins."""
        limit = NO_LIMIT if source.name in self.absent else self.limit
        return max(len(p.token_ids) for p in load_prompts(source, self.tokenizer, limit))

    def _shortest(self, source: JsonlSource, target: Path, num: int) -> JsonlSource:
        with open(source.path, "rb") as file:
            target.write_bytes(b"".join(islice(file, LOOKED_AT)))
        few = source.model_copy(update={"path": str(target)})
        try:
            prompts = load_prompts(few, self.tokenizer, self.limit)
            rows = [row for _, row in read_jsonl(target)]
        except ValueError as error:
            raise ValueError(str(error).replace(str(target), source.path)) from None
        numbers = [int(prompt.uid.rpartition("/")[2]) for prompt in prompts]
        lengths = {n: len(p.token_ids) for n, p in zip(numbers, prompts, strict=True)}
        kept = sorted(sorted(numbers, key=lambda n: lengths[n])[:num])
        _write(target, [rows[n] for n in kept])
        return few

    def _stand_in(
        self, source: JsonlSource | ReasoningGymSource, target: Path, num: int
    ) -> JsonlSource:
        sums = [f"{n} + {n + 1} =" for n in range(1, num + 1)]
        texts: list[object] = list(sums)
        try:
            messages = [[{"role": "user", "content": text}] for text in sums]
            self.tokenizer.chat(messages[0])
            texts = list(messages)
        except ValueError:
            pass  # no chat template
        answers = [str(2 * n + 1) for n in range(1, num + 1)]
        _write(target, [{"prompt": t, "answer": a} for t, a in zip(texts, answers, strict=True)])
        return JsonlSource(
            type="jsonl",
            name=source.name,
            path=str(target),
            reward=f"{stand_in.__file__}:{stand_in.score.__name__}",
            weight=source.weight,
        )


def _is_absent(source: JsonlSource | ReasoningGymSource) -> bool:
    if isinstance(source, JsonlSource):
        return not Path(source.path).is_file()
    return importlib.util.find_spec("reasoning_gym") is None


def _write(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
