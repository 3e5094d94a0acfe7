"""In which phases the engine holds its memory: one device, used in turn."""

from __future__ import annotations

from rlhf.dist.groups import PhaseGroup
from rlhf.rollout.engine import RolloutEngine
from rlhf.types import Phase

AWAKE = frozenset({Phase.ROLLOUT, Phase.EVAL, Phase.RESHARD})
ASLEEP = frozenset({Phase.SCORE, Phase.UPDATE})
"""Phases in neither set leave the engine as it is."""


class EngineResidency:
    """Puts the engine to sleep and wakes it at the edges of phases; all ranks together.

    A woken engine has memory but no weights: it refuses to generate until a reshard has completed.
    """

    def __init__(self, engine: RolloutEngine | None, group: PhaseGroup) -> None:
        """``engine`` is None on ranks that do not lead one."""
        self._engine = engine
        self._group = group
        self._awake = True

    def enter(self, phase: Phase) -> None:
        """Release or take back memory for this phase. Collective over all ranks.

        Training may allocate only when all engines have released, an engine only when all ranks
        have left the phase before: hence a meeting after the one and before the other.
        """
        if phase in ASLEEP and self._awake:
            if self._engine is not None:
                self._engine.sleep()
            self._group.gather(None)
            self._awake = False
        elif phase in AWAKE and not self._awake:
            self._group.gather(None)
            if self._engine is not None:
                self._engine.wake()
            self._awake = True
