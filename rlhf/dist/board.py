"""What ranks tell one another beside their collectives: a few keys in the launcher's store.

The store answers while a rank waits in a collective, or is gone. Keys carry the number of the
attempt, as the launcher's restarts share one store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LAUNCHER = -1
"""Who posts, when no rank does."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended the run: the rank at fault, where it was, and who said so."""

    rank: int
    phase: str
    step: int
    cause: str
    told_by: int

    def __str__(self) -> str:
        return f"stopped: rank {self.rank}, phase {self.phase}, step {self.step}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's sign of life; ``number`` grows as long as its watcher thread runs."""

    number: int = 0
    phase: str = "setup"
    step: int = -1
    meetings: int = 0
    """Meetings of all ranks that it has come to."""
    at_edge: bool = False
    """It waits to enter the phase."""

    def __str__(self) -> str:
        return f"{'at the edge of' if self.at_edge else 'in'} phase {self.phase}, step {self.step}"


class StoreLostError(RuntimeError):
    """The store does not answer any more: whoever holds it is gone."""


class Board:
    """Typed access to the keys. Every call may raise :class:`StoreLostError`."""

    def __init__(self, store: Any, environ: Mapping[str, str] = os.environ) -> None:
        """``store``: a TCPStore; its client may be used by several threads."""
        self._store = store
        self._prefix = f"rlhf/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def post(self, failure: Failure) -> Failure:
        """Tell all; the first failure counts. Returns the one that counts."""
        text = self._ask("compare_set", self._key("failed"), "", json.dumps(asdict(failure)))
        return Failure(**json.loads(text))

    def failure(self) -> Failure | None:
        text = self._read("failed")
        return Failure(**json.loads(text)) if text else None

    def ask(self, signal_number: int) -> None:
        """Ask all ranks to stop at the next edge."""
        self._ask("set", self._key("asked"), str(int(signal_number)))

    def asked(self) -> int:
        """The signal for which all shall stop; 0 = none."""
        return int(self._read("asked") or 0)

    def beat(self, rank: int, beat: Beat) -> None:
        self._ask("set", self._key(f"beat/{rank}"), json.dumps(asdict(beat)))

    def last_beat(self, rank: int) -> Beat:
        """The newest one; number 0 if there was none yet."""
        text = self._read(f"beat/{rank}")
        return Beat(**json.loads(text)) if text else Beat()

    def last_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """The same of many; one message when all have beaten."""
        if not ranks:
            return {}
        keys = [self._key(f"beat/{rank}") for rank in ranks]
        if not self._ask("check", keys):
            return {rank: self.last_beat(rank) for rank in ranks}
        texts = self._ask("multi_get", keys)
        return {rank: Beat(**json.loads(t)) for rank, t in zip(ranks, texts, strict=True)}

    def leave(self, rank: int) -> None:
        """This rank watches and beats no longer: it has ended well, or has heard of a failure."""
        self._ask("set", self._key(f"left/{rank}"), "1")

    def has_left(self, *ranks: int) -> bool:
        return bool(self._ask("check", [self._key(f"left/{rank}") for rank in ranks]))

    def leave_node(self, node: int) -> None:
        """No rank of this node needs the store any more."""
        self._ask("set", self._key(f"node_left/{node}"), "1")

    def nodes_have_left(self, nodes: Sequence[int]) -> bool:
        return bool(self._ask("check", [self._key(f"node_left/{node}") for node in nodes]))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _read(self, name: str) -> str:
        key = self._key(name)
        return self._ask("get", key).decode() if self._ask("check", [key]) else ""

    def _ask(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, call)(*arguments)
        except RuntimeError as error:
            raise StoreLostError(f"{call}: {error}") from error
