"""Which memory is on the device in which phase: Phase x Region, as data. Pure, no torch.

A phase is entered with what it needs; what it does not need may stay if the table holds it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema import MemorySection


class Region(StrEnum):
    """Memory with one owner."""

    ACTOR = "actor weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    REFERENCE = "reference"
    CRITIC = "critic weights"
    CRITIC_GRADIENTS = "critic gradients"
    CRITIC_OPTIMIZER = "critic optimizer"
    REWARD_MODEL = "reward model"
    ENGINE = "engine weights"
    DERIVED = "engine derived"
    KV_CACHE = "KV cache"
    WINDOWS = "windows"
    SCORING = "pass (forward)"
    TRAINING = "pass (training)"
    LOGITS = "logit chunks"
    OTHER = "context, NCCL, graphs"


Regions = frozenset[Region]


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, of a role where there are several."""

    phase: str
    role: str = ""

    def __str__(self) -> str:
        return f"{self.phase}({self.role})" if self.role else self.phase


_ENGINE = frozenset({Region.ENGINE, Region.DERIVED})
_SERVING = _ENGINE | {Region.KV_CACHE}
NEEDED: Mapping[Span, Regions] = {
    Span("ROLLOUT"): _SERVING,
    Span("SCORE", "reward_model"): frozenset({Region.REWARD_MODEL, Region.SCORING}),
    Span("SCORE", "actor"): frozenset({Region.ACTOR, Region.SCORING, Region.LOGITS}),
    Span("SCORE", "reference"): frozenset({Region.REFERENCE, Region.SCORING, Region.LOGITS}),
    Span("SCORE", "critic"): frozenset({Region.CRITIC, Region.SCORING}),
    Span("UPDATE", "critic"): frozenset(
        {Region.CRITIC, Region.CRITIC_GRADIENTS, Region.CRITIC_OPTIMIZER, Region.TRAINING}
    ),
    Span("UPDATE", "actor"): frozenset(
        {Region.ACTOR, Region.GRADIENTS, Region.OPTIMIZER, Region.TRAINING, Region.LOGITS}
    ),
    Span("SAVE"): frozenset({Region.ACTOR, Region.OPTIMIZER, Region.CRITIC}),
    Span("RESHARD"): _ENGINE | {Region.ACTOR},
    Span("RESTORE"): _ENGINE | {Region.ACTOR},
    Span("EVAL"): _SERVING,
}
"""What a phase cannot be without. RESTORE: the actor's weights come back from the engine's."""
CHANGES: Mapping[Span, Regions] = {
    Span("UPDATE", "actor"): frozenset({Region.ACTOR}),
    Span("UPDATE", "critic"): frozenset({Region.CRITIC}),
}
"""What a phase writes, so that a copy of it is out of date."""
ALWAYS = frozenset({Region.WINDOWS, Region.OTHER})
RESTORE = Span("RESTORE")
_STATES = frozenset({Region.OPTIMIZER, Region.CRITIC_OPTIMIZER})
_KEPT_BY_ROLES = _STATES | {Region.ACTOR, Region.REFERENCE, Region.CRITIC, Region.REWARD_MODEL}
_ROLES = {
    "reference": Region.REFERENCE,
    "critic": Region.CRITIC,
    "reward_model": Region.REWARD_MODEL,
}
_TRAINING = ("SCORE", "UPDATE")


@dataclass(frozen=True, slots=True)
class Table:
    """The phases of a run. Those that are missing leave all memory as it is."""

    needed: Mapping[Span, Regions]
    """Restored before the phase if it is away."""
    held: Mapping[Span, Regions]
    """May be there; the rest is released before the phase."""

    def find(self, phase: str, role: str = "") -> Span | None:
        """The phase of the table that a run enters: its own, or that of all roles."""
        found = (Span(phase.upper(), role), Span(phase.upper()))
        return next((span for span in found if span in self.held), None)


def residency(
    memory: MemorySection,
    roles: Iterable[str],
    *,
    from_engine: bool = False,
    num_updates: int = 1,
) -> Table:
    """Which regions are on the device in which phase.

    - ``time_slice: engine``: roles keep weights and optimizer states in all phases; the engine
      wakes with its KV cache before RESHARD; a critic's gradients stay until the updates end, and
      with several updates in a step so do the actor's.
    - ``time_slice: all``: a phase has what it needs, and optimizer states that are on the device.

    An engine with weights keeps them during SAVE: nothing would bring them back.

    Args:
        roles: of the run, beside the actor: reference, critic, reward_model.
        from_engine: the actor's weights come back from the engine, after which nothing else could
            bring them: they stay from RESTORE until they have been moved to the engine again.
        num_updates: of one step.
    """
    present = set(roles)
    absent = {role for role in _ROLES if role not in present}
    gone = frozenset(_ROLES[role] for role in absent)
    if "critic" in absent:
        gone |= {Region.CRITIC_GRADIENTS, Region.CRITIC_OPTIMIZER}
    written_from_host = _STATES if memory.optimizer == "host" else frozenset()
    whole = memory.time_slice == "all"
    needs, holds = {}, {}
    for span, needed in NEEDED.items():
        if span.role in absent or (span == RESTORE and not (whole and from_engine)):
            continue
        away = gone | written_from_host if span.phase == "SAVE" else gone
        if not whole and span.phase == "RESHARD":
            needed |= {Region.KV_CACHE}
        held = needed | ALWAYS
        if memory.optimizer == "device":
            held |= _STATES
        if span.phase == "SAVE":
            held |= _ENGINE if whole else _SERVING
        if not whole:
            held |= _kept_without_slicing(span, memory, num_updates)
        elif from_engine and span.phase in _TRAINING:
            held |= {Region.ACTOR}
        needs[span], holds[span] = needed - away, held - away
    return Table(needs, holds)


def _kept_without_slicing(span: Span, memory: MemorySection, num_updates: int) -> Regions:
    kept = _KEPT_BY_ROLES if memory.optimizer == "device" else _KEPT_BY_ROLES - _STATES
    if span == Span("UPDATE", "actor"):
        kept |= {Region.CRITIC_GRADIENTS}
    if span == Span("UPDATE", "critic") and num_updates > 1:
        kept |= {Region.GRADIENTS}
    return kept


@dataclass(frozen=True, slots=True)
class Switch:
    """On the way into ``span``: first released, then restored."""

    span: Span
    release: Regions
    restore: Regions


def switches(table: Table, there: Regions, known: Regions, span: Span) -> list[Switch]:
    """What an edge does: the difference between the phase left and the phase entered.

    Where the engine gives up the weights that only it has of the actor, the way goes through
    RESTORE.

    Args:
        there: what is there now.
        known: what can be released and restored at all.
        span: a phase of the table.
    """
    out, path = [], [span]
    lost = Region.ENGINE not in table.held[span] or Region.ACTOR in table.needed[span]
    if RESTORE in table.held and Region.ENGINE in there and Region.ACTOR in known - there and lost:
        path.insert(0, RESTORE)
    for stop in path:
        release = there & known - table.held[stop]
        restore = table.needed[stop] & known - there
        if release or restore:
            out.append(Switch(stop, release, restore))
        there = there - release | restore
    return out


@dataclass(frozen=True, slots=True)
class Peak:
    """Of steps that take and give back memory, in the unit of their sizes."""

    size: float
    first_overflow: str | None
    """The first step after which there is more than the capacity."""

    @property
    def fits(self) -> bool:
        return self.first_overflow is None


def peak_of(steps: Iterable[tuple[str, float]], capacity: float) -> Peak:
    """Add up ``steps``, (name, what it takes; negative: what it gives back), in their order."""
    total, most, overflow = 0.0, 0.0, None
    for name, size in steps:
        total += size
        most = max(most, total)
        if overflow is None and total > capacity:
            overflow = name
    return Peak(most, overflow)


def steps_through(
    table: Table, spans: Iterable[Span], sizes: Mapping[Region, int]
) -> list[tuple[str, int]]:
    """What a run releases and takes, in order, on its way through ``spans`` from nothing.

    Regions that all phases hold are taken first; passes come and go with their phase.
    """
    passing = frozenset({Region.SCORING, Region.TRAINING, Region.LOGITS})
    there: Regions = frozenset(sizes).intersection(*table.held.values())
    known = frozenset(sizes) - passing - ALWAYS
    out = [(str(region), sizes[region]) for region in sorted(there)]
    for span in spans:
        for switch in switches(table, there, known, span):
            where = f" for {switch.span}"
            out += [(f"{r} released{where}", -sizes[r]) for r in sorted(switch.release)]
            out += [(f"{r} restored{where}", sizes[r]) for r in sorted(switch.restore)]
            there = there - switch.release | switch.restore
        own = sorted(table.held[span] & passing & frozenset(sizes))
        out += [(f"{r} in {span}", sizes[r]) for r in own]
        out += [(f"{r} after {span}", -sizes[r]) for r in own]
    return out
