"""Rows rendered and tokenised: what the engine sees. Unusable ones are dropped and named."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlhf.config.schema import JsonlSource, ReasoningGymSource
from rlhf.data.sources import Row, load_rows
from rlhf.data.tokenizer import Tokenizer
from rlhf.types import Prompt

logger = logging.getLogger(__name__)
MOST_NAMED = 10


def load_prompts(
    source: JsonlSource | ReasoningGymSource, tokenizer: Tokenizer, max_prompt_tokens: int
) -> list[Prompt]:
    """All usable prompts of a source, in its order; warns about those that are dropped.

    Raises:
        ValueError: none is left, or the source is faulty (see :func:`rlhf.data.sources.load_rows`).
    """
    rows = drop_empty(load_rows(source))
    if not rows:
        raise ValueError(f"{source.name}: no prompt is left: the source has none, or all are empty")
    prompts = [_prompt(row, source.name, tokenizer) for row in rows]
    lengths = [len(p.token_ids) for p in prompts]
    try:
        kept = drop_overlong(lengths, max_prompt_tokens)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from None
    overlong = [row for row, n in zip(rows, lengths, strict=True) if n > max_prompt_tokens]
    _warn(overlong, f"longer than {max_prompt_tokens} tokens")
    return [prompts[i] for i in kept]


def drop_empty(rows: Sequence[Row]) -> list[Row]:
    """Rows with something to ask; a warning names the others."""
    filled = [row for row in rows if _content(row).strip()]
    _warn([row for row in rows if not _content(row).strip()], "empty")
    return filled


def drop_overlong(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Positions of the rendered, tokenised prompts that fit; one of exactly the limit does.

    Raises:
        ValueError: none fits.
    """
    kept = [i for i, length in enumerate(lengths) if length <= max_tokens]
    if not kept:
        raise ValueError(
            f"no prompt is left: all {len(lengths)} are longer than "
            f"data.max_prompt_tokens={max_tokens}, the shortest has {min(lengths)} tokens"
        )
    return kept


def _content(row: Row) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return str(row.prompt[-1]["content"] or "")


def _prompt(row: Row, domain: str, tokenizer: Tokenizer) -> Prompt:
    try:
        text = row.prompt if isinstance(row.prompt, str) else tokenizer.chat(row.prompt)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error
    return Prompt(
        uid=f"{domain}/{row.number}",
        domain=domain,
        text=text,
        token_ids=tuple(tokenizer.encode(text)),
        answer=row.answer,
        metadata=row.metadata,
    )


def _warn(rows: Sequence[Row], why: str) -> None:
    if rows:
        named = ", ".join(row.place for row in rows[:MOST_NAMED])
        more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
        logger.warning("dropped %d prompts that are %s: %s%s", len(rows), why, named, more)
