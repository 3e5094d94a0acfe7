"""Restore: the actor's weights out of engines that are awake, as the last reshard left them."""

from __future__ import annotations

from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import RolloutLayout
from rlhf.reshard.execute import Mover
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.resharder import of_engine


class Restorer:
    """One read: begin, one loader call driven through the windows, end; on all ranks at once."""

    def __init__(
        self,
        *,
        mover: Mover,
        engine: RolloutEngine | None,
        layout: RolloutLayout,
        group: PhaseGroup,
        timeout_s: float,
    ) -> None:
        """
        Args:
            mover: out of the engine into the actor's parameters, whose memory is there.
            engine: None on ranks that do not lead one.
        """
        self._mover = mover
        self._engine = engine
        self._layout = layout
        self._group = group
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Collective over all ranks.

        Raises:
            RuntimeError: a transfer or an engine failed, or its weights are not valid.
        """
        messages = self._group.gather(self._mover.update_message())
        if self._engine is not None:
            mine = of_engine(messages, self._layout, self._group.world.rank)
            self._engine.begin_read(mine, self._timeout_s)
        self._mover.run(self._poll)
        if self._engine is not None:
            self._engine.end_read()

    def _poll(self) -> None:
        if self._engine is not None:
            self._engine.poll()
