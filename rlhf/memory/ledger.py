"""Bytes by region and phase: as predicted, and as measured when the phase ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf.memory.table import Region, Span, Table
from rlhf.track.metrics import Max, Metric

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""A phase may have so much more than predicted."""
GIB = 2**30
MIB = 2**20
Measure = Callable[[], Mapping[Region, int]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One phase on one rank. Bytes."""

    span: Span
    measured: Mapping[Region, int]
    predicted: Mapping[Region, int]
    """Of all regions of the phase, measured or not."""
    process: int
    """Host memory of the process: anonymous and shared pages."""
    device_peak: int
    """Most that the process had allocated on its GPU since the entry before; 0 without one."""

    @property
    def measured_bytes(self) -> int:
        return sum(self.measured.values())

    @property
    def predicted_bytes(self) -> int:
        """Of what was measured."""
        return sum(self.predicted.get(region, 0) for region in self.measured)

    @property
    def excess(self) -> float:
        """Measured over predicted, less one; 0 where nothing was predicted or measured."""
        return self.measured_bytes / self.predicted_bytes - 1 if self.predicted_bytes else 0.0

    @property
    def largest_excess(self) -> Region:
        """The region that is furthest above its prediction."""
        return max(self.measured, key=lambda r: self.measured[r] - self.predicted.get(r, 0))


class Ledger:
    """What this rank holds, phase by phase."""

    def __init__(
        self, table: Table, predicted: Mapping[Region, int], host_predicted: int = 0
    ) -> None:
        """
        Args:
            predicted: bytes of this rank's regions.
            host_predicted: bytes of host memory for roles.
        """
        self._table = table
        self._predicted = predicted
        self.host_predicted = host_predicted
        self._measures: list[Measure] = []
        self._host: list[Callable[[], int]] = []
        self._entries: dict[Span, Entry] = {}
        self._warned: set[Span] = set()

    def watch(self, measure: Measure) -> None:
        """Also measure this; regions of two are added."""
        self._measures.append(measure)

    def watch_host(self, measure: Callable[[], int]) -> None:
        """Also count these bytes of host memory."""
        self._host.append(measure)

    @property
    def host_bytes(self) -> int:
        """Host memory that roles have for what is away."""
        return sum(measure() for measure in self._host)

    def measured(self) -> dict[Region, int]:
        """Bytes by region now; those with nothing are left out."""
        out: dict[Region, int] = {}
        for measure in self._measures:
            for region, size in measure().items():
                out[region] = out.get(region, 0) + size
        return {region: out[region] for region in Region if out.get(region)}

    def measure(self, span: Span) -> Entry:
        """At the end of ``span``; warns once of a phase that is over its prediction."""
        held = self._table.held[span]
        entry = Entry(
            span=span,
            measured=self.measured(),
            predicted={r: self._predicted[r] for r in Region if r in held & self._predicted.keys()},
            process=process_bytes(),
            device_peak=_device_peak(),
        )
        last = self._entries.get(span)
        if last is None or entry.measured_bytes >= last.measured_bytes:
            self._entries[span] = entry
        if entry.excess > TOLERANCE and span not in self._warned:
            self._warned.add(span)
            logger.warning(_warning(entry))
        return entry

    def take(self) -> list[Entry]:
        """The fullest entry of each phase since the last call."""
        taken, self._entries = list(self._entries.values()), {}
        return taken

    @contextmanager
    def explaining(self, where: str) -> Iterator[None]:
        """An error of memory that leaves here has the ledger with it."""
        try:
            yield
        except BaseException as error:
            self.explain(error, where)
            raise

    def explain(self, error: BaseException, where: str) -> None:
        """Add the ledger to an error that tells of too little memory; others stay as they are."""
        if is_out_of_memory(error) and not getattr(error, "__notes__", None):
            error.add_note(self.text(where))

    def text(self, where: str) -> str:
        """What is there now against the prediction, a line for each region."""
        measured = self.measured()
        rows = [f"memory of this rank {where}, MiB:  measured  predicted"]
        for region in Region:
            if region in measured or region in self._predicted:
                there = f"{measured.get(region, 0) / MIB:,.1f}"
                rows.append(
                    f"  {region:<24}{there:>14}{self._predicted.get(region, 0) / MIB:>11,.1f}"
                )
        rows.append(f"  {'copies on the host':<24}{self.host_bytes / MIB:>14,.1f}")
        rows.append(f"  {'process, on the host':<24}{process_bytes() / MIB:>14,.1f}")
        return "\n".join(rows)


def ledger_metrics(entries: Sequence[Entry], host_bytes: int) -> dict[str, Metric]:
    """What the fullest rank has in each phase, beside the prediction; which regions of a phase
    that is over it are furthest above theirs, as a share of the phase's prediction."""
    out: dict[str, Metric] = {}
    for entry in entries:
        name = entry.span.phase.lower() + (f"_{entry.span.role}" if entry.span.role else "")
        out[f"memory/{name}_gib"] = Max(entry.measured_bytes / GIB)
        out[f"memory/{name}_predicted_gib"] = Max(entry.predicted_bytes / GIB)
        if entry.excess > TOLERANCE:
            region = str(entry.largest_excess).replace(" ", "_")
            out[f"memory/over/{region}"] = Max(entry.excess)
    if entries:
        out["memory/host_copies_gib"] = Max(host_bytes / GIB)
    return out


def ledger_text(entries: Sequence[Entry]) -> str:
    """Phases of one rank with their regions: MiB measured, MiB predicted."""
    lines = [f"{'MiB of one rank':<32}{'measured':>12}{'predicted':>12}"]
    for entry in entries:
        lines.append(
            f"{entry.span!s:<32}{entry.measured_bytes / MIB:>12,.1f}"
            f"{entry.predicted_bytes / MIB:>12,.1f}"
        )
        for region, size in entry.measured.items():
            said = f"{entry.predicted[region] / MIB:,.1f}" if region in entry.predicted else "away"
            lines.append(f"  {region:<30}{size / MIB:>12,.1f}{said:>12}")
        lines.append(f"  {'process, on the host':<30}{entry.process / MIB:>12,.1f}")
    return "\n".join(lines) + "\n"


def is_out_of_memory(error: BaseException) -> bool:
    """torch's error of a device, the RuntimeError of its CPU allocator, or Python's own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def process_bytes() -> int:
    """Host memory of this process that no file backs: RssAnon and RssShmem."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def _device_peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def _warning(entry: Entry) -> str:
    region = entry.largest_excess
    have, said = entry.measured[region], entry.predicted.get(region, 0)
    return (
        f"{entry.span} has {entry.measured_bytes / MIB:,.1f} MiB, {entry.excess:.0%} more than the "
        f"{entry.predicted_bytes / MIB:,.1f} predicted; most of it is {region}, "
        f"{have / MIB:,.1f} MiB for {said / MIB:,.1f}"
    )
