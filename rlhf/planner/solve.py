"""The layouts with the shortest step among those that fit. Pure.

Seconds of training and of engines do not depend on each other but for the room that the cache has:
pairs are tried from the shortest sum on, with a cache as large as it may be, and those whose least
memory is above a GPU's are left out before the ledger counts. The search ends when no pair that is
left can be shorter than the last one that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rlhf.memory.table import Region
from rlhf.planner.candidates import Fixed, rollout_candidates, train_candidates
from rlhf.planner.engine_memory import kv_token_bytes
from rlhf.planner.fit import misfits
from rlhf.planner.least import cannot_fit
from rlhf.planner.load import Load
from rlhf.planner.memory import Job, Ledger, Machine, ledger
from rlhf.planner.rollout_time import Served, engine_params
from rlhf.planner.speeds import Speeds
from rlhf.planner.step_time import Moved, step_times
from rlhf.planner.time_report import Timing

MOST_LEDGERS = 120
"""Pairs whose memory is counted in full, at most."""
MOST_PAIRS = 50_000
WANTED = 4
STEP = 100
"""A share of the device is a multiple of 1 / STEP."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A pair of layouts that fits."""

    job: Job
    ledger: Ledger
    timing: Timing

    @property
    def step_s(self) -> float:
        return self.timing.step_s


@dataclass(frozen=True, slots=True)
class Search:
    """``solutions``, the best first; what was looked at."""

    solutions: tuple[Solution, ...]
    num_train: int
    num_rollout: int
    num_ledgers: int
    whole: bool  # nothing that is left can be better


Mover = Callable[[Job], Moved]


def solve(
    job: Job,
    speeds: Speeds,
    load: Load,
    machine: Machine,
    fixed: Fixed,
    moved: Mover | None = None,
) -> Search:
    """Search around ``job``, of which all but the layouts is kept.

    ``rollout.mem_fraction`` is taken as the largest that may be, and lowered where a phase would
    not fit otherwise; micro-batches follow the context parallel ranks.

    Args:
        moved: seconds of a reshard by its real plan, for the solutions; None: estimated.
    """
    trains = _ranked(train_candidates(job, machine, fixed), speeds, load, machine, train=True)
    rollouts = _ranked(rollout_candidates(job, machine, fixed), speeds, load, machine, train=False)
    pairs = sorted(
        (a + b, i, j) for i, (a, _) in enumerate(trains) for j, (b, _) in enumerate(rollouts)
    )
    found: list[Solution] = []
    too_large: set[int] = set()
    counted, whole = 0, True
    for least_s, i, j in pairs[:MOST_PAIRS]:
        if len(found) >= WANTED and least_s >= found[-1].step_s:
            break
        if i in too_large:
            continue
        train, rollout = trains[i][1], rollouts[j][1]
        pair = replace(train, rollout=rollout.rollout, rollout_layout=rollout.rollout_layout)
        if cannot_fit(pair, machine, any_cache=True):
            continue
        if counted == MOST_LEDGERS:
            whole = False
            break
        counted += 1
        solution = _fitted(pair, speeds, load, machine, fixed)
        if solution is None:
            if _train_alone_is_too_large(pair, machine):
                too_large.add(i)
            continue
        found = sorted([*found, solution], key=lambda s: s.step_s)[:WANTED]
    if moved is not None:
        found = [solution_of(s.job, s.ledger, speeds, load, machine, moved(s.job)) for s in found]
    found.sort(key=lambda s: s.step_s)
    return Search(tuple(found), len(trains), len(rollouts), counted, whole)


def _ranked(
    jobs: Iterable[Job], speeds: Speeds, load: Load, machine: Machine, *, train: bool
) -> list[tuple[float, Job]]:
    """With the seconds of the phases that the side decides, at least."""
    out = []
    for job in jobs:
        if not (_shares_answers(job, load) if train else _admits_its_share(job, load)):
            continue
        changed = load_for(job, load)
        room = most_kv_tokens(job, machine)
        if room < job.longest_tokens and not train:
            continue
        times = step_times(job, speeds, changed, machine, max(1, room))
        own = ("SCORE", "UPDATE") if train else ("ROLLOUT", "PACK", "SWITCH")
        out.append((sum(t.seconds for span, t in times.items() if span.phase in own), job))
    return sorted(out, key=lambda item: item[0])


def _shares_answers(job: Job, load: Load) -> bool:
    """Each replica trains as many answers in an update."""
    return load.answers // load.updates % job.train_layout.dp == 0


def _admits_its_share(job: Job, load: Load) -> bool:
    """An engine that shall repeat itself begins all its answers at once."""
    layout = job.rollout_layout
    prompts = -(-load.prompts // layout.num_engines)
    share = -(-prompts // layout.dp) * layout.dp * load.samples
    return not job.rollout.deterministic or share <= job.rollout.max_running_requests


def load_for(job: Job, load: Load) -> Load:
    """The load in the job's micro-batches."""
    return replace(load, microbatch_tokens=job.train.tokens_per_microbatch)


def most_kv_tokens(job: Job, machine: Machine) -> int:
    """Of an attention group, if nothing but ``rollout.mem_fraction`` were in the way."""
    if job.rollout.kv_tokens is not None:
        return job.rollout.kv_tokens
    engine = Served(job.shape, job.rollout_layout, job.itemsize, True, 1, machine.gpus_per_node)
    weights = engine_params(engine) * engine.weight_bytes / job.rollout_layout.pp
    room = job.rollout.mem_fraction * machine.gpu_bytes - weights
    return max(0, int(room // min(kv_token_bytes(job.shape, job.rollout_layout, job.itemsize))))


def _fitted(
    pair: Job, speeds: Speeds, load: Load, machine: Machine, fixed: Fixed
) -> Solution | None:
    """The pair with its seconds; with a smaller share for engines if only that is in the way."""
    held = ledger(pair, machine)
    if misfits(pair, held, machine) and pair.rollout.kv_tokens is None:
        smaller = _smaller_share(pair, held, machine)
        if smaller is None or "mem_fraction" in fixed.rollout:
            return None
        pair = replace(pair, rollout=pair.rollout.model_copy(update={"mem_fraction": smaller}))
        held = ledger(pair, machine)
    if misfits(pair, held, machine):
        return None
    return solution_of(pair, held, speeds, load, machine)


def _smaller_share(pair: Job, held: Ledger, machine: Machine) -> float | None:
    """The engine's share of the device that the phases with a cache leave."""
    over = max(
        max(held.phase_bytes(span)) - machine.gpu_bytes
        for span, regions in held.phases.items()
        if Region.KV_CACHE in regions
    )
    if over <= 0:
        return None  # something else is in the way
    share = int((pair.rollout.mem_fraction - over / machine.gpu_bytes) * STEP) / STEP
    return share if share > 0 else None


def _train_alone_is_too_large(pair: Job, machine: Machine) -> bool:
    held = ledger(pair, machine)
    return any(
        max(held.phase_bytes(span)) > machine.gpu_bytes
        for span, regions in held.phases.items()
        if Region.ENGINE not in regions
    )


def solution_of(
    job: Job,
    held: Ledger,
    speeds: Speeds,
    load: Load,
    machine: Machine,
    moved: Moved | None = None,
) -> Solution:
    """A job whose ledger is known, with its seconds."""
    changed = load_for(job, load)
    times = step_times(job, speeds, changed, machine, held.kv_tokens, moved)
    return Solution(job, held, Timing(times, changed, speeds, job.train_layout.world))
