"""``rlhf doctor --probe MODEL``: our weight tables against the installed SGLang, at real widths."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf.dist.layout import LayoutError, RolloutLayout
from rlhf.dist.layout_text import parse_rollout, rollout_text
from rlhf.rollout.forks import Outcome, Probe
from rlhf.rollout.probe import Difference, Probed, differences, probe_many, table, write_config
from rlhf.weights.families import check_rollout, rollout_faults
from rlhf.weights.find_model import find_config, find_model
from rlhf.weights.model_shape import ModelShape

MAX_SHOWN = 12
"""Differences of a rank in the text; the JSON has all."""
SIZES = (64, 32, 16, 8, 4, 2)
PATTERNS: tuple[Callable[[int], str], ...] = (
    lambda n: f"tp={n}",
    lambda n: f"tp={n},ep={n}",
    lambda n: f"tp={n},dp={n // 2 or 1}",
    lambda n: f"tp={n},dp={n // 8 or 1},ep={n}",
    lambda n: f"tp={n},dp={n // 8 or 1},ep={n},a2a=deepep",
    lambda n: f"tp={n},pp=2",
)
"""Of each, the largest that a model admits is looked at when no layout is given."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank gave."""

    layout: str
    rank: int
    params: int
    pieces: int
    seconds: float
    peak_mib: float
    differences: tuple[Difference, ...]
    error: str
    """Last line of the traceback of SGLang's refusal; empty: there is none."""

    @property
    def is_equal(self) -> bool:
        return not self.differences and not self.error

    def as_text(self) -> str:
        head = f"{self.layout:32} rank {self.rank:<5}"
        if self.error:
            return f"{head} failed: {self.error}"
        head += (
            f"{self.params:>6} params {self.pieces:>7} pieces {self.seconds:6.1f} s "
            f"{self.peak_mib:5.0f} MiB  "
        )
        if self.is_equal:
            return head + "equal"
        more = len(self.differences) - MAX_SHOWN
        return "\n    ".join(
            [
                f"{head}{len(self.differences)} differences",
                *map(str, self.differences[:MAX_SHOWN]),
                *([f"and {more} more; --json has all"] if more > 0 else []),
            ]
        )

    def as_record(self) -> dict[str, object]:
        record = {name: getattr(self, name) for name in self.__slots__}
        found = [
            {"param": d.param, "local": d.local, "table": d.table, "sglang": d.sglang}
            for d in self.differences
        ]
        return record | {"differences": found, "equal": self.is_equal}


def doctor_probe(model: str, rollout: str | None, *, as_json: bool) -> int:
    """Print a line per rank as it is found; 1 if anything differs or SGLang refuses, else 0.

    Args:
        model: a Hugging Face folder, a ``config.json`` or a known name; no weights are read.
        rollout: a layout, as in ``tp=8,ep=8``; None: the largest of each pattern.

    Raises:
        ValueError: the model or the layout is not one that we know.
    """
    shape = find_model(model)
    raw = json.loads(find_config(model).read_text(encoding="utf-8"))
    layouts = likely_layouts(shape) if rollout is None else [given_layout(shape, rollout)]
    ranks = [(layout, rank) for layout in layouts for rank in looked_at(layout)]
    if not as_json:
        print(ranks_line(layouts), flush=True)
    reports = []
    with tempfile.TemporaryDirectory(prefix="rlhf-probe-") as folder:
        write_config(Path(folder), raw)
        for outcome in probe_many([Probe(folder, layout, rank) for layout, rank in ranks]):
            reports.append(report(shape, outcome))
            if not as_json:
                print(reports[-1].as_text(), flush=True)
    if as_json:
        print(json.dumps([r.as_record() for r in reports], indent=1))
    return 0 if all(r.is_equal for r in reports) else 1


def given_layout(shape: ModelShape, text: str) -> RolloutLayout:
    """One engine of this layout.

    Raises:
        LayoutError: it cannot be parsed, or the model does not admit it.
    """
    layout = one_engine(text)
    check_rollout(shape, layout)
    return layout


def one_engine(text: str) -> RolloutLayout:
    """The layout over as many ranks as one engine has."""
    layout = parse_rollout(text, 0)  # every size divides no ranks
    return replace(layout, world=layout.engine_size)


def likely_layouts(shape: ModelShape) -> list[RolloutLayout]:
    """One rank, and of each pattern the largest that the model admits."""
    return list(dict.fromkeys([RolloutLayout(1), *_largest(shape)]))


def _largest(shape: ModelShape) -> Iterator[RolloutLayout]:
    for pattern in PATTERNS:
        for size in SIZES:
            try:
                layout = one_engine(pattern(size))
            except LayoutError:
                continue
            if not any(rollout_faults(shape, layout)):
                yield layout
                break


def looked_at(layout: RolloutLayout) -> list[int]:
    """First, middle and last tp rank of the first stage, the last one of the last stage.

    The middle one is in the middle of the middle expert group. A stage between is like the first
    without its embedding; its first rank stands for it.
    """
    middle = layout.ep // 2 * layout.expert_tp + layout.expert_tp // 2
    ranks = {0, min(middle, layout.tp - 1), layout.tp - 1, layout.engine_size - 1}
    if layout.pp > 2:
        ranks.add(layout.tp * (layout.pp // 2))
    return sorted(ranks)


def ranks_line(layouts: Sequence[RolloutLayout]) -> str:
    """Which ranks are looked at, and of how many."""
    total = sum(layout.engine_size for layout in layouts)
    seen = sum(len(looked_at(layout)) for layout in layouts)
    of = f"{len(layouts)} layouts" if len(layouts) > 1 else rollout_text(layouts[0])
    return (
        f"{seen} of {total} ranks of {of}: the first, a middle and the last one "
        "of each kind of stage; the others differ from these in their numbers only"
    )


def report(shape: ModelShape, outcome: Outcome[Probed]) -> RankReport:
    """Compare one rank with the table."""
    probe, seen = outcome.probe, outcome.value
    last_line = outcome.error.strip().splitlines()[-1] if outcome.error else ""
    return RankReport(
        layout=rollout_text(probe.layout),
        rank=probe.rank,
        params=len(seen.params) if seen else 0,
        pieces=len(seen.pieces) if seen else 0,
        seconds=round(outcome.seconds, 2),
        peak_mib=round(outcome.peak_mib),
        differences=tuple(differences(table(shape, probe), seen)) if seen else (),
        error=last_line,
    )
