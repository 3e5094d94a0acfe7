"""Reshard: the actor's weights into the live parameters of the engines, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import RolloutLayout
from rlhf.reshard.execute import Mover, MoveStats
from rlhf.rollout.engine import RolloutEngine
from rlhf.types import Phase


class Resharder:
    """One update: begin, one loader call driven through the windows, end; on all ranks at once."""

    def __init__(
        self,
        *,
        mover: Mover,
        engine: RolloutEngine | None,
        layout: RolloutLayout,
        group: PhaseGroup,
        gate: PhaseGate,
        on_version: Callable[[int], None],
        timeout_s: float,
    ) -> None:
        """``engine`` is None on ranks that do not lead one."""
        self._mover = mover
        self._engine = engine
        self._layout = layout
        self._group = group
        self._gate = gate
        self._on_version = on_version
        self._timeout_s = timeout_s
        self.stats: MoveStats | None = None

    def open(self) -> None:
        """Show every engine process its window and its part of the plan, once.

        Collective over all ranks.

        Raises:
            RuntimeError: the live parameters are not those of the plan; names the first.
        """
        messages = self._group.gather(self._mover.open_message())
        if self._engine is not None:
            self._engine.call_loader(self._of_my_engine(messages))
        self._group.gather(None)  # the leader has called
        self._mover.window.wait_opened(self._timeout_s, self._poll)

    def run(self, *, version: int, step: int) -> None:
        """Bring all engines to ``version``. Collective over all ranks.

        Raises:
            RuntimeError: a transfer or an engine failed; that engine refuses to generate until a
                later update has completed.
        """
        with self._gate.phase(Phase.RESHARD, step):
            messages = self._group.gather(self._mover.update_message())
            if self._engine is not None:
                self._engine.begin_update(self._of_my_engine(messages), self._timeout_s)
            self.stats = self._mover.run(self._poll)
            if self._engine is not None:
                self._engine.end_update(version)
            self._on_version(version)

    def _poll(self) -> None:
        if self._engine is not None:
            self._engine.poll()

    def _of_my_engine(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        me = self._layout.coord(self._group.world.rank).engine
        return [messages[r] for r in self._layout.engine_ranks(me)]
