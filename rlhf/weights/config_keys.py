"""Values of a ``config.json``, read with their types; errors name the key and what it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it holds none; begins with the path.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: must hold a JSON object: {error}") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}: must hold a JSON object, holds a {type(raw).__name__}")
    return raw


def count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1, or 0 where that is the default.

    Args:
        default: what null, 0 and no such key stand for; None: the key must be there.

    Raises:
        KeyError: the key is missing and has no default.
        ValueError: it is no such number.
    """
    value: Any = raw[key] if default is None else raw.get(key)
    if default is not None and (value is None or (value == 0 and not isinstance(value, bool))):
        return default
    least = 0 if default == 0 else 1
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < least:
        raise ValueError(
            f"{key}: must be a whole number of at least {least}, is {json.dumps(value)}"
        )
    return int(value)


def number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number of at least 0; errors as of :func:`count`."""
    value = raw[key] if default is None else raw.get(key, default)
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not math.isfinite(value) or value < 0:
        raise ValueError(f"{key}: must be a finite number of at least 0, is {json.dumps(value)}")
    return float(value)


def mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty where the key is missing or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}: must be an object, is {json.dumps(value)}")
    return value or {}


def strings(raw: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts; empty where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{key}: must be a list of names, is {json.dumps(value)}")
    return value


def token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One token id or a list of them; empty where the key is missing or null."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{key}: must be a token id or a list of them, is {json.dumps(value)}")
    return tuple(ids)
