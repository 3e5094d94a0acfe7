"""One error for all faults of a configuration, and the hint for a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run. ``faults`` has one ``source:key.path: ...`` line each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """``"did you mean x?"``, or the list of options when nothing is near."""
    known = sorted(set(options))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"possible are {', '.join(known)}" if known else "nothing is possible here"
