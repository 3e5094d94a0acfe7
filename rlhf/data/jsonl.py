"""JSON lines, split at line feeds only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_NAMED = 10


def read_jsonl(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank.

    Only a line feed ends a line: U+2028, U+2029 and U+0085 inside a text do not.

    Raises:
        ValueError: no such file, or lines that are not JSON objects; names each as ``path:line``.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    rows: list[tuple[int, dict[str, Any]]] = []
    faults = []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError as error:
            faults.append(f"{path}:{number}: not JSON: {error}")
            continue
        if isinstance(value, dict):
            rows.append((number, value))
        else:
            faults.append(f"{path}:{number}: must be an object, is {type(value).__name__}")
    if faults:
        more = len(faults) - MOST_NAMED
        raise ValueError(
            "\n".join(faults[:MOST_NAMED]) + (f"\n... and {more} more lines" if more > 0 else "")
        )
    return rows
