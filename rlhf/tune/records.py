"""What a slice of ``rlhf tune`` is told and what it tells, as files in its run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

JOB, MEASURED = "tune_job.json", "tune_measured.json"


@dataclass(frozen=True, slots=True)
class SliceJob:
    """What a slice measures."""

    microbatch_tokens: tuple[int, ...]
    """Sizes to try, that of the configuration first; empty: no passes."""
    rounds: int
    """At most."""
    seconds: float
    """Time for all rounds after the first; there are three rounds at least."""
    save: bool = False
    """Also write a checkpoint, when all rounds are done."""

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JOB).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> SliceJob:
        raw = json.loads((folder / JOB).read_text(encoding="utf-8"))
        return SliceJob(**{**raw, "microbatch_tokens": tuple(raw["microbatch_tokens"])})


@dataclass(frozen=True, slots=True)
class Pass:
    """Scores and updates of one rollout with micro-batches of one size; of the slowest rank."""

    microbatch_tokens: int
    num_microbatches: int  # of the rank with most, over all updates
    tokens: int  # of this replica, padding included
    seconds: dict[str, float]  # by phase


@dataclass(frozen=True, slots=True)
class Round:
    """One rollout, its passes, one reshard. Tokens are means over answers."""

    answers: int
    trained_answers: int
    prompt_tokens: float
    answer_tokens: float
    longest_answer_tokens: int
    seconds: dict[str, float]  # of all but the passes, by phase, of the slowest rank
    passes: list[Pass]
    save_s: float | None = None
    """Of a checkpoint after this round; None: there was none."""


def read_rounds(folder: Path) -> list[Round]:
    """What a slice has written, without its first round, which pays for warming up."""
    raw = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
    return [Round(**{**r, "passes": [Pass(**p) for p in r["passes"]]}) for r in raw][1:]


def write_rounds(rounds: Sequence[Round], folder: Path) -> None:
    """For :func:`read_rounds`."""
    text = json.dumps([asdict(r) for r in rounds])
    (folder / MEASURED).write_text(text, encoding="utf-8")
