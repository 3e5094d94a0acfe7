"""The engine's memory as regions: one device, used in turn."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.dist.groups import PhaseGroup
from rlhf.memory.table import Region, Regions
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.engine_state import EnginePart, EngineParts, EngineState, Use

PARTS: Mapping[Region, EnginePart] = {
    Region.ENGINE: "weights",
    Region.DERIVED: "weights",
    Region.KV_CACHE: "kv_cache",
}


class EngineMemory:
    """The engine that shares this rank's device; all its ranks call alike.

    A woken engine has memory but no weights: it refuses to generate until a reshard has completed.
    """

    regions: Regions = frozenset(PARTS)

    def __init__(self, engine: RolloutEngine | None, group: PhaseGroup) -> None:
        """``engine`` is None on ranks that do not lead one."""
        self._engine = engine
        self._group = group
        self._state = EngineState()

    def release(self, regions: Regions, *, changed: bool) -> None:
        """The engine sleeps. What others do with the memory waits for :meth:`settle`."""
        if (parts := self._state.release(_parts(regions))) and self._engine is not None:
            self._engine.sleep(parts)

    def settle(self) -> None:
        """Training may allocate only when all engines have released, an engine only when all ranks
        have left the phase before. Collective over all ranks."""
        self._group.gather(None)
        self._state.released(self._state.releasing)

    def blocks(self) -> str:
        missing = self._state.missing(Use.ALLOCATE)
        return "" if missing is None else f"the engine: {missing}"

    def restore(self, regions: Regions) -> None:
        if (parts := self._state.resume(_parts(regions))) and self._engine is not None:
            self._engine.wake(parts)

    def resident_bytes(self) -> Mapping[Region, int]:
        """Its processes are not this rank's to measure."""
        return {}


def _parts(regions: Regions) -> EngineParts:
    return frozenset(PARTS[region] for region in regions)
