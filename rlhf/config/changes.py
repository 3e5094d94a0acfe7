"""Which keys of two resolved configurations differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def changed_keys(before: Any, after: Any) -> list[str]:
    """``key.path: old -> new`` for each key with another value, items of lists by number."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        f"{key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in {**old, **new}
        if key not in old or key not in new or old[key] != new[key]
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        here = f"{path}.{key}" if path else str(key)
        if child and isinstance(child, dict | list):
            yield from _leaves(child, here)
        else:
            yield here, child
