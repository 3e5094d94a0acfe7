"""Rows of a data source: read or generated, not yet rendered and tokenised."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from rlhf.config.faults import did_you_mean
from rlhf.config.schema import JsonlSource, ReasoningGymSource
from rlhf.data.jsonl import read_jsonl
from rlhf.data.tokenizer import Message


@dataclass(frozen=True, slots=True)
class Row:
    """One question. ``place`` is where a person finds it, ``number`` its position in the source."""

    place: str
    number: int
    prompt: str | Sequence[Message]
    """Plain text is used as it is; messages go through the model's chat template."""
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load_rows(source: JsonlSource | ReasoningGymSource) -> list[Row]:
    """All rows of a source, in its order.

    Raises:
        ValueError: a row lacks a key or has the wrong type, an unknown task, a bad template.
    """
    return _jsonl_rows(source) if isinstance(source, JsonlSource) else _generated_rows(source)


def _jsonl_rows(source: JsonlSource) -> list[Row]:
    rows = []
    for number, (line, raw) in enumerate(read_jsonl(source.path)):
        place = f"{source.path}:{line}"
        for key in (source.prompt_key, source.answer_key):
            if key not in raw:
                raise ValueError(f"{place}: must have the key {key!r}; {did_you_mean(key, raw)}")
        prompt, answer = raw[source.prompt_key], raw[source.answer_key]
        if not isinstance(prompt, str):
            _check_messages(prompt, f"{place}: {source.prompt_key}")
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise ValueError(
                f"{place}: {source.answer_key} must be a text or a number, is {answer!r}"
            )
        rest = {k: v for k, v in raw.items() if k not in (source.prompt_key, source.answer_key)}
        rows.append(Row(place, number, prompt, str(answer), rest))
    return rows


def _check_messages(value: Any, place: str) -> None:
    good = (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
    )
    if not good:
        raise ValueError(
            f"{place} must be a text or a list of messages with role and content, is {value!r:.80}"
        )


def _generated_rows(source: ReasoningGymSource) -> list[Row]:
    """Distinct items of a task; the first ``held_out`` of a seeded shuffle are held out."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"{source.name}: reasoning_gym tasks need the reasoning-gym package: {error}"
        ) from error
    if source.task not in DATASETS:
        raise ValueError(
            f"{source.name}: unknown reasoning-gym task {source.task!r}; "
            f"{did_you_mean(source.task, DATASETS)}"
        )
    try:
        made = reasoning_gym.create_dataset(
            source.task, seed=source.seed, size=source.size, **source.params
        )
        items = list(made)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"{source.name}: reasoning-gym task {source.task} refuses params "
            f"{dict(source.params)}: {error}"
        ) from error
    distinct = {_identity(item): (i, item) for i, item in reversed(list(enumerate(items)))}
    order = sorted(distinct.values(), key=lambda pair: pair[0])
    random.Random(f"held-out {source.seed}").shuffle(order)
    if len(order) <= source.held_out:
        raise ValueError(
            f"{source.name}: held_out={source.held_out} must be below the number of distinct items "
            f"of {source.task}, which is {len(order)} among size={source.size}; "
            "raise size or lower held_out"
        )
    held_out, train = order[: source.held_out], order[source.held_out :]
    chosen = held_out if source.split == "held_out" else train
    return [_generated_row(source, number, item) for number, item in chosen]


def _identity(item: Mapping[str, Any]) -> str:
    return str(item["metadata"].get("expression", item["question"]))


def _generated_row(source: ReasoningGymSource, number: int, item: Mapping[str, Any]) -> Row:
    place = f"{source.name} item {number}"
    if source.template is None:
        prompt: str | list[Message] = [{"role": "user", "content": item["question"]}]
    else:
        values = {**item["metadata"], "question": item["question"]}
        prompt = render(source.template, values, f"template of {source.name}")
    return Row(place, number, prompt, str(item["answer"]), {"task": source.task, "item": item})


def render(template: str, values: Mapping[str, Any], place: str) -> str:
    """``template`` with ``{key}`` replaced; ``{{`` and ``}}`` stand for braces.

    Raises:
        ValueError: unbalanced braces, or a key that ``values`` lacks.
    """
    out = []
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{place}: {error}; write {{{{ and }}}} for braces") from None
    for text, key, spec, conversion in parts:
        out.append(text)
        if key is None:
            continue
        if key not in values or spec or conversion:
            raise ValueError(f"{place}: {{{key}}} is unknown; {did_you_mean(key, values)}")
        out.append(str(values[key]))
    return "".join(out)
