"""Layouts that a model can have on so many ranks: the space that the solver searches. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rlhf.config.schema import RolloutSection
from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout, sequence_multiple
from rlhf.planner.memory import Job, Machine
from rlhf.weights.families import rollout_faults, train_faults

MOST_STAGES = 32
CHUNKS = (1, 2, 3, 4, 6)
CONTEXT = (1, 2, 4, 8)
ENGINE_RANKS = (1, 2, 4, 8, 16, 32, 64)
LONG_TOKENS = 8192
"""Shorter sequences are not cut over context parallel ranks."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What a person has chosen: keys of a section, which every candidate keeps."""

    train: frozenset[str] = frozenset()
    rollout: frozenset[str] = frozenset()
    built_only: bool = False
    """Only what `rlhf train` runs today: engines in one node, no DeepEP."""


def train_candidates(job: Job, machine: Machine, fixed: Fixed) -> Iterator[Job]:
    """The job in every training layout: tp in a node, stages of equal cost or nearly, virtual
    chunks, context parallel ranks for long sequences, experts over as many ranks as divide them.

    A micro-batch keeps its rows per rank, and holds the longest sequence.
    """
    keep, world = job.train, job.train_layout.world
    rows = keep.tokens_per_microbatch / keep.cp

    def options(key: str, values: Iterable[int]) -> list[int]:
        given = getattr(keep, key)
        return [given] if key in fixed.train else list(values)

    contexts = CONTEXT if job.longest_tokens >= LONG_TOKENS else (1,)
    for tp in options("tp", _divisors(math.gcd(world, machine.gpus_per_node))):
        for cp in options("cp", contexts):
            if world % (tp * cp):
                continue
            for pp in options("pp", _divisors(world // (tp * cp))):
                if pp > min(job.shape.num_layers, MOST_STAGES) or world % (tp * cp * pp):
                    continue
                for ep, etp in _experts(job, world // pp, tp, fixed):
                    for vpp in options("vpp", CHUNKS if pp > 1 else (1,)):
                        for ends in _ends(job, pp, vpp, fixed):
                            layout = _layout(world, tp, pp, vpp, cp, ep, etp, ends)
                            if layout is not None:
                                yield from _with_train(job, layout, rows, fixed)


def rollout_candidates(job: Job, machine: Machine, fixed: Fixed) -> Iterator[Job]:
    """The job with every kind of engine: tp, DP-attention, experts over all ranks or none."""
    keep, world = job.rollout, job.rollout_layout.world
    sizes = [n for n in ENGINE_RANKS if world % n == 0]
    if fixed.built_only:
        sizes = [n for n in sizes if machine.gpus_per_node % n == 0]

    def options(key: str, values: Iterable[int]) -> list[int]:
        return [getattr(keep, key)] if key in fixed.rollout else list(values)

    for tp in options("tp", sizes):
        for dp in options("dp", _divisors(tp)):
            for ep in options("ep", _expert_ranks(job, tp)):
                a2as = ("none", "deepep") if ep == tp > 1 and not fixed.built_only else ("none",)
                for a2a in a2as if "a2a" not in fixed.rollout else (keep.a2a,):
                    settings = {"tp": tp, "dp": dp, "ep": ep, "a2a": a2a}
                    changed = keep.model_copy(update=settings)
                    layout = _engines(job, changed)
                    if layout is not None:
                        yield replace(job, rollout=changed, rollout_layout=layout)


def _expert_ranks(job: Job, tp: int) -> list[int]:
    """Whole experts on each rank; where there are too few of them, all of them cut."""
    moe = job.shape.moe
    return [tp] if moe is not None and moe.num_experts % tp == 0 else [1]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _experts(job: Job, per_stage: int, tp: int, fixed: Fixed) -> Iterator[tuple[int, int | None]]:
    """(ep, etp); experts whole, or cut as attention is."""
    if job.shape.moe is None:
        yield 1, None
        return
    given = job.train
    sizes = [given.ep] if "ep" in fixed.train else _divisors(job.shape.moe.num_experts)
    cuts = [given.etp] if "etp" in fixed.train else sorted({1, tp})
    for ep in sizes:
        for etp in cuts:
            if per_stage % (ep * (etp or tp)) == 0:
                yield ep, etp


def _ends(job: Job, pp: int, vpp: int, fixed: Fixed) -> Iterator[tuple[int | None, int | None]]:
    """Layers of the first and the last stage: even ones, or the middle ones equal and the rest
    at one end or both. A head costs about as much as a layer or two."""
    given, layers = job.train, job.shape.num_layers
    if {"first", "last"} & fixed.train:
        yield given.first, given.last
        return
    if layers % (pp * vpp) == 0 or pp == 1:
        yield None, None
    if pp == 1 or vpp > 1:
        return
    for middle in {layers // pp, -(-layers // pp)}:
        last = layers - middle * (pp - 1)
        if 1 <= last != middle:
            yield None, last
        both = layers - middle * (pp - 2)
        for last in {both // 2, both // 2 - 1}:
            first = both - last
            if pp > 2 and last >= 1 and first >= 1 and middle not in (first, last):
                yield first, last


def _layout(
    world: int,
    tp: int,
    pp: int,
    vpp: int,
    cp: int,
    ep: int,
    etp: int | None,
    ends: tuple[int | None, int | None],
) -> TrainLayout | None:
    try:
        return TrainLayout(world, tp, pp, vpp, cp, ep, etp, *ends)
    except LayoutError:
        return None


def _with_train(job: Job, layout: TrainLayout, rows: float, fixed: Fixed) -> Iterator[Job]:
    shapes = [s for s in (job.shape, job.critic, job.reward_model) if s is not None]
    if any(list(train_faults(shape, layout)) for shape in shapes):
        return
    try:
        for shape in shapes:
            for pp in range(layout.pp):
                for v in range(layout.vpp):
                    layout.layers(shape.num_layers, pp, v)
    except LayoutError:
        return
    parallel = job.train.sequence_parallel if "sequence_parallel" in fixed.train else layout.tp > 1
    if (parallel and layout.tp == 1) or (job.shape.moe and layout.tp > 1 and not parallel):
        return
    tokens = job.train.tokens_per_microbatch
    if "tokens_per_microbatch" not in fixed.train:
        multiple = sequence_multiple(layout.tp, layout.cp, parallel)
        longest = -(-job.longest_tokens // multiple) * multiple
        tokens = max(longest, int(rows * layout.cp))
    keys = ("tp", "pp", "vpp", "cp", "ep", "etp", "first", "last")
    settings: dict[str, object] = {key: getattr(layout, key) for key in keys}
    settings |= {"sequence_parallel": parallel, "tokens_per_microbatch": tokens}
    changed = job.train.model_copy(update=settings)
    yield replace(job, train=changed, train_layout=layout)


def _engines(job: Job, rollout: RolloutSection) -> RolloutLayout | None:
    try:
        layout = RolloutLayout(
            job.rollout_layout.world,
            rollout.tp,
            rollout.dp,
            rollout.ep,
            rollout.pp,
            rollout.a2a,
            rollout.quantization,
        )
    except LayoutError:
        return None
    return None if list(rollout_faults(job.shape, layout)) else layout
