"""Restore: the actor's weights out of engines that are awake, as the last reshard left them."""

from __future__ import annotations

from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import RolloutLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.shard_sums import ShardRecord
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.resharder import first_fault, of_engine


class Restorer:
    """One read: begin, one loader call driven through the windows, end; on all ranks at once."""

    def __init__(
        self,
        *,
        mover: Mover,
        record: ShardRecord,
        engine: RolloutEngine | None,
        layout: RolloutLayout,
        group: PhaseGroup,
        timeout_s: float,
    ) -> None:
        """
        Args:
            mover: out of the engine into the actor's parameters, whose memory is there.
            record: what they were when they were moved to the engine.
            engine: None on ranks that do not lead one.
        """
        self._mover = mover
        self._record = record
        self._engine = engine
        self._layout = layout
        self._group = group
        self._timeout_s = timeout_s

    def run(self) -> None:
        """Collective over all ranks.

        Raises:
            RuntimeError: a transfer or an engine failed, its weights are not valid, or the reshard
                before was verified and something else has come back.
        """
        messages = self._group.gather(self._mover.update_message())
        if self._engine is not None:
            mine = of_engine(messages, self._layout, self._group.world.rank)
            self._engine.begin_read(mine, self._timeout_s)
        self._mover.run(self._poll)
        if self._engine is not None:
            self._engine.end_read()
        if fault := first_fault(self._group, self._record.faults()):
            raise RuntimeError(f"the restore was verified and is wrong: {fault}")

    def _poll(self) -> None:
        if self._engine is not None:
            self._engine.poll()
