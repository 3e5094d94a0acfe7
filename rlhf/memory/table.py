"""Which memory is on the device in which phase: Phase x Region, as data. Pure, no torch."""

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
ALWAYS = frozenset({Region.WINDOWS, Region.OTHER})
_STATES = frozenset({Region.OPTIMIZER, Region.CRITIC_OPTIMIZER})
_KEPT_BY_ROLES = _STATES | {Region.ACTOR, Region.REFERENCE, Region.CRITIC, Region.REWARD_MODEL}
_WITH_GRADIENTS_OF_CRITIC = Span("UPDATE", "actor")
_ROLES = {
    "reference": Region.REFERENCE,
    "critic": Region.CRITIC,
    "reward_model": Region.REWARD_MODEL,
}


def residency(memory: MemorySection, roles: Iterable[str]) -> dict[Span, Regions]:
    """Which regions are on the device in which phase.

    - ``time_slice: engine``: roles keep weights and optimizer states in all phases; the engine
      wakes with its KV cache before RESHARD; a critic's gradients stay until the updates end.
    - ``time_slice: all``: a phase has what it needs, and optimizer states that are on the device.

    Args:
        roles: of the run, beside the actor: reference, critic, reward_model.
    """
    present = set(roles)
    absent = {role for role in _ROLES if role not in present}
    gone = frozenset(_ROLES[role] for role in absent)
    if "critic" in absent:
        gone |= {Region.CRITIC_GRADIENTS, Region.CRITIC_OPTIMIZER}
    whole = memory.time_slice == "all"
    out = {}
    for span, needed in NEEDED.items():
        if span.role in absent or (span.phase == "RESTORE" and not whole):
            continue
        held = needed | ALWAYS
        if memory.optimizer == "device":
            held |= _STATES
        if not whole:
            held |= _KEPT_BY_ROLES if memory.optimizer == "device" else _KEPT_BY_ROLES - _STATES
            if span.phase == "RESHARD":
                held |= {Region.KV_CACHE}
            if span == _WITH_GRADIENTS_OF_CRITIC:
                held |= {Region.CRITIC_GRADIENTS}
        if memory.optimizer == "host" and span.phase == "SAVE":
            held -= _STATES
        out[span] = held - gone
    return out
