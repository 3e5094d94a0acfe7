"""A plan as text and as a record."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf.memory.table import Region, Span
from rlhf.planner.fit import GIGA, Change, Misfit
from rlhf.planner.memory import Job, Ledger, Machine
from rlhf.planner.time_report import Timing, assumptions, timing_text
from rlhf.planner.train_memory import DiskBytes

WIDTH = 88


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory, disk and seconds of a job on a machine."""

    name: str
    job: Job
    machine: Machine
    ledger: Ledger
    disk: DiskBytes
    misfits: Sequence[Misfit]
    change: Change | None  # with which it would fit
    timing: Timing

    @property
    def fits(self) -> bool:
        return not self.misfits

    @property
    def kv_tokens_total(self) -> int:
        """Of all attention groups of all engines."""
        layout = self.job.rollout_layout
        return self.ledger.kv_tokens * layout.dp * layout.num_engines

    @property
    def kv_sequences_total(self) -> int:
        """Of the greatest length, at a time; one lies in one attention group."""
        layout = self.job.rollout_layout
        each = self.ledger.kv_tokens // self.job.longest_tokens
        return each * layout.dp * layout.num_engines

    @property
    def peak(self) -> tuple[Span, int, int]:
        """The fullest phase, its fullest rank, and bytes."""
        found = {span: self.ledger.phase_bytes(span) for span in self.ledger.phases}
        span = max(found, key=lambda s: max(found[s]))
        most = max(found[span])
        return span, found[span].index(most), most

    def as_dict(self) -> dict[str, object]:
        """Bytes; each size as that of the rank with least, the mean, the rank with most."""
        span, rank, most = self.peak
        held = self.ledger
        return {
            "model": self.name,
            "gpus": self.job.train_layout.world,
            "nodes": len(held.host),
            "gpu_bytes": self.machine.gpu_bytes,
            "host_bytes": self.machine.host_bytes,
            "fits": self.fits,
            "not_built": not_built(self.job),
            "misfits": [str(misfit) for misfit in self.misfits],
            "change": None if self.change is None else self.change.words,
            "peak_phase": str(span),
            "peak_rank": rank,
            "peak_bytes": most,
            "regions": {str(region): _spread(sizes) for region, sizes in held.regions.items()},
            "phases": {
                str(span): _spread(held.phase_bytes(span))
                | {"regions": [str(region) for region in Region if region in regions]}
                for span, regions in held.phases.items()
            },
            "ways": {str(region): str(way) for region, way in held.ways.items()},
            "host_bytes_per_node": _spread(held.host),
            "kv_token_bytes": max(held.kv_token_bytes),
            "kv_tokens_per_group": held.kv_tokens,
            "kv_tokens_total": self.kv_tokens_total,
            "kv_sequences_total": self.kv_sequences_total,
            "export_bytes": self.disk.export,
            "state_bytes": self.disk.state,
            **self.timing.as_dict(),
        }


def plan_text(plan: Plan, layouts: tuple[str, str]) -> str:
    """About 60 lines. ``layouts``: of training and engines, in words."""
    job, machine, held = plan.job, plan.machine, plan.ledger
    num_nodes, num_gpus = len(held.host), job.train_layout.world
    nodes = f"{num_nodes} nodes of {machine.gpus_per_node}" if num_nodes > 1 else "one node"
    where = f"{num_gpus} GPU{'s' * (num_gpus > 1)} of {machine.gpu_bytes / GIGA:g} GB, {nodes}"
    return "\n".join(
        [
            f"{plan.name}: {where}",
            f"  train    {layouts[0]}",
            f"  rollout  {layouts[1]}",
            "",
            *_table("GB per rank", ((str(k), v) for k, v in held.regions.items())),
            "",
            *_table("GB in a phase", ((str(s), held.phase_bytes(s)) for s in held.phases)),
            "",
            *timing_text(plan.timing),
            "",
            *_rest(plan),
            *assumptions(plan.timing),
            "",
            *_verdict(plan),
        ]
    )


def check_line(plan: Plan, name: str) -> str:
    """One line: the verdict, the fullest phase, the step's seconds and what bounds it."""
    span, _, most = plan.peak
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    where = f"{plan.name} on {plan.job.train_layout.world}"
    line = (
        f"{verdict:<13}{name}: {where}, {most / GIGA:.1f} GB in {span}, "
        f"{plan.timing.step_s:,.0f} s per step, most in {plan.timing.bound}"
    )
    if plan.fits:
        return line
    change = f"; change {plan.change.words}" if plan.change else ""
    return f"{line}; {plan.misfits[0]}{change}"


def _table(title: str, rows: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
    head = f"{title:<24}{'least':>10}{'mean':>10}{'most':>10}"
    return [head, "-" * len(head), *(_row(name, sizes) for name, sizes in rows)]


def _row(name: str, sizes: Sequence[int]) -> str:
    least, mean, most = min(sizes), sum(sizes) / len(sizes), max(sizes)
    return f"{name:<24}" + "".join(f"{size / GIGA:>10.2f}" for size in (least, mean, most))


def _rest(plan: Plan) -> list[str]:
    held, machine, job = plan.ledger, plan.machine, plan.job
    groups = job.rollout_layout.dp * job.rollout_layout.num_engines
    return [
        f"KV cache   {held.kv_tokens:,} tokens in each of {groups} attention groups, "
        f"{plan.kv_tokens_total:,} in all,",
        f"           {max(held.kv_token_bytes) / 1e3:.1f} kB each: {plan.kv_sequences_total:,} "
        f"sequences of {job.longest_tokens:,} tokens at a time",
        f"host       {max(held.host) / GIGA:.0f} GB of {machine.host_bytes / GIGA:g} on the "
        f"fullest node, {sum(held.host) / len(held.host) / GIGA:.0f} in the mean",
        f"disk       {plan.disk.state / GIGA:,.0f} GB for a checkpoint, "
        f"{plan.disk.export / GIGA:,.0f} GB for an export",
        *_ways_words(plan.ledger),
        *_folded(
            f"assumed    {machine.other_bytes / GIGA:g} GB per GPU for CUDA context, "
            "communicators, CUDA graphs and the engine's own buffers. Passes are estimates from "
            "shapes, with experts evenly loaded; all else is counted. GB are 1e9 bytes."
        ),
    ]


def _ways_words(held: Ledger) -> list[str]:
    ways = ", ".join(f"{region} from the {way}" for region, way in held.ways.items())
    return _folded(f"comes back {ways}") if ways else []


def _verdict(plan: Plan) -> list[str]:
    span, rank, most = plan.peak
    if plan.fits:
        left = (plan.machine.gpu_bytes - most) / GIGA
        return [
            f"fits: {span} is the fullest phase, {most / GIGA:.1f} GB on rank {rank}; "
            f"{left:.1f} GB are left",
            *_not_built_words(plan),
        ]
    out = ["does not fit:", *(f"  {misfit}" for misfit in plan.misfits)]
    if plan.change is None:
        out.append(
            "no setting of memory, windows, micro-batches, engines or GPUs that was tried fits"
        )
    else:
        most = max(max(plan.change.ledger.phase_bytes(s)) for s in plan.change.ledger.phases)
        host = max(plan.change.ledger.host)
        out += _folded(
            f"change     {plan.change.words}: then at most {most / GIGA:.1f} GB per GPU and "
            f"{host / GIGA:.0f} GB of a node's host"
        )
    return [*out, *_not_built_words(plan)]


def not_built(job: Job) -> list[str]:
    """What a plan may have and a run may not."""
    engines, names = job.rollout_layout, []
    if engines.a2a != "none":
        names.append(f"rollout.a2a={engines.a2a}")
    return names


def _not_built_words(plan: Plan) -> list[str]:
    names = ", ".join(not_built(plan.job))
    return _folded(f"not built  {names}: `rlhf train` refuses these for now") if names else []


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 11)


def _spread(sizes: Sequence[int]) -> dict[str, object]:
    return {"least": min(sizes), "mean": sum(sizes) / len(sizes), "most": max(sizes)}
