"""Does a job fit, and if not, which is the smallest change after which it does. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf.dist.layout import LayoutError, node_faults
from rlhf.memory.table import Region, Span
from rlhf.planner.least import cannot_fit
from rlhf.planner.memory import Job, Ledger, Machine, ledger
from rlhf.weights.families import rollout_faults

GIGA = 1e9
SMALLEST_WINDOW_BYTES = 64 * 2**20
LARGEST_FRACTION = 0.9
GROWTH = (2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Something that needs more than there is. Bytes, or tokens of the KV cache."""

    what: str  # a phase on a rank, the host of a node, the KV cache
    need: int
    have: int
    regions: tuple[tuple[Region, int], ...] = ()  # largest first
    unit: str = "GB"

    def __str__(self) -> str:
        if self.unit == "tokens":
            return f"{self.what} holds {self.have:,} tokens, {self.need:,} are the longest sequence"
        over = (self.need - self.have) / GIGA
        line = (
            f"{self.what} needs {self.need / GIGA:.1f} GB, {over:.1f} more than the "
            f"{self.have / GIGA:g} there are"
        )
        parts = ", ".join(f"{region} {size / GIGA:.1f}" for region, size in self.regions)
        return f"{line}: {parts}" if parts else line


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that would fit, as a person writes them."""

    words: str
    ledger: Ledger
    ranks: int


def misfits(job: Job, found: Ledger, machine: Machine) -> list[Misfit]:
    """All that is too large: phases, each on its fullest rank; hosts; a KV cache too short."""
    out = [m for span in found.phases if (m := _phase_misfit(found, span, machine)) is not None]
    host = max(found.host)
    if host > machine.host_bytes:
        node = found.host.index(host)
        out.append(Misfit(f"host of node {node}", host, machine.host_bytes))
    if found.kv_tokens < job.longest_tokens:
        out.append(
            Misfit("KV cache", job.longest_tokens, found.kv_tokens, unit="tokens"),
        )
    return out


def _phase_misfit(found: Ledger, span: Span, machine: Machine) -> Misfit | None:
    sizes = found.phase_bytes(span)
    need = max(sizes)
    if need <= machine.gpu_bytes:
        return None
    rank = sizes.index(need)
    regions = sorted(
        ((region, found.regions[region][rank]) for region in found.phases[span]),
        key=lambda item: -item[1],
    )
    return Misfit(f"{span} on rank {rank}", need, machine.gpu_bytes, tuple(regions[:3]))


def smallest_change(job: Job, machine: Machine) -> Change | None:
    """The first change of :func:`_changes` after which everything fits, None if there is none."""
    for words, changed in _changes(job):
        layout = changed.rollout_layout
        if cannot_fit(changed, machine) or any(
            node_faults(layout, min(machine.gpus_per_node, layout.world))
        ):
            continue
        found = ledger(changed, machine)
        if not misfits(changed, found, machine):
            return Change(words, found, changed.train_layout.world)
    return None


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """From those that cost nothing to those that cost GPUs: a setting, what the device lends to the
    host, larger engines, two of these together, more ranks."""
    lent = list(_lent(job))
    yield from _settings(job)
    yield from lent
    yield from _larger_engines(job)
    for words, lean in lent[-1:]:
        for more, changed in (*_settings(lean), *_larger_engines(lean)):
            yield _joined(words, more), changed
    for factor in GROWTH:
        for words, start in [("", job), *lent[-1:]]:
            for more, changed in (("", start), *_larger_engines(start)):
                if (grown := _more_ranks(changed, factor)) is not None:
                    gpus = f"{grown.train_layout.world} GPUs"
                    yield _joined(words, _joined(more, gpus)), grown


def _joined(first: str, second: str) -> str:
    return f"{first} and {second}" if first and second else first or second


def _settings(job: Job) -> Iterator[tuple[str, Job]]:
    """One setting smaller, or the engine's share of the device."""
    fraction = job.rollout.mem_fraction
    if job.rollout.kv_tokens is None:
        steps = [round(fraction + 0.1 * i, 2) for i in (-1, -2, -3, -4, 1, 2, 3)]
        for step in steps:
            if 0 < step <= LARGEST_FRACTION:
                yield f"rollout.mem_fraction={step:g}", _with(job, "rollout", mem_fraction=step)
    window = job.window_bytes // 2
    while window >= SMALLEST_WINDOW_BYTES:
        words = f"reshard.window_mib={window >> 20}"
        yield words, replace(job, window_bytes=window)
        window //= 2
    tokens = job.train.tokens_per_microbatch // 2
    while tokens >= job.longest_tokens:
        words = f"train.tokens_per_microbatch={tokens}"
        yield words, _with(job, "train", tokens_per_microbatch=tokens)
        tokens //= 2
    if job.train.recompute != "full":
        yield "train.recompute=full", _with(job, "train", recompute="full")


def _lent(job: Job) -> Iterator[tuple[str, Job]]:
    """What the device lends; both last."""
    words, changed = "", job
    for key, value in (("time_slice", "all"), ("optimizer", "host")):
        if getattr(job.memory, key) != value:
            word = f"memory.{key}={value}"
            yield word, _with(job, "memory", **{key: value})
            words, changed = _joined(words, word), _with(changed, "memory", **{key: value})
    if " and " in words:
        yield words, changed


def _larger_engines(job: Job) -> Iterator[tuple[str, Job]]:
    """Twice the ranks and more for an engine, experts and groups for attention with them."""
    layout, factor = job.rollout_layout, 2
    while layout.tp * factor * layout.pp <= layout.world:
        ep, dp = (n * factor if n > 1 else n for n in (layout.ep, layout.dp))
        try:
            larger = replace(layout, tp=layout.tp * factor, ep=ep, dp=dp)
            fits = not list(rollout_faults(job.shape, larger))
        except LayoutError:
            fits = False
        if fits:
            keys = ("tp", "ep", "dp")
            changed = {k: n for k in keys if (n := getattr(larger, k)) != getattr(layout, k)}
            words = ", ".join(f"rollout.{key}={size}" for key, size in changed.items())
            yield words, replace(job, rollout_layout=larger)
        factor *= 2


def _more_ranks(job: Job, factor: int) -> Job | None:
    try:
        return replace(
            job,
            train_layout=replace(job.train_layout, world=job.train_layout.world * factor),
            rollout_layout=replace(job.rollout_layout, world=job.rollout_layout.world * factor),
        )
    except LayoutError:
        return None


def _with(job: Job, section: str, **settings: object) -> Job:
    changed: dict[str, Any] = {section: getattr(job, section).model_copy(update=settings)}
    return replace(job, **changed)
