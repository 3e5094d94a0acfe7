"""Reshard: the actor's weights into the live parameters of the engines, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf.config.schema import ReshardSection
from rlhf.dist.clock import Cause
from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup
from rlhf.dist.layout import RolloutLayout
from rlhf.reshard.execute import Mover, MoveStats
from rlhf.reshard.shard_sums import ShardRecord
from rlhf.rollout.engine import RolloutEngine
from rlhf.rollout.score_probe import ScoreProbe
from rlhf.types import Phase


class Resharder:
    """One update: begin, one loader call driven through the windows, end; on all ranks at once."""

    def __init__(
        self,
        *,
        mover: Mover,
        back: Mover | None,
        record: ShardRecord | None,
        engine: RolloutEngine | None,
        layout: RolloutLayout,
        group: PhaseGroup,
        gate: PhaseGate,
        probe: ScoreProbe,
        on_version: Callable[[int], None],
        on_stats: Callable[[MoveStats], None],
        config: ReshardSection,
    ) -> None:
        """
        Args:
            back: the movement out of the engine through the same window, if there is one.
            record: of the actor's shard, if it comes back by ``back``.
            engine: None on ranks that do not lead one.
        """
        self._mover = mover
        self._back = back
        self._record = record
        self._engine = engine
        self._layout = layout
        self._group = group
        self._gate = gate
        self._probe = probe
        self._on_version = on_version
        self._on_stats = on_stats
        self._timeout_s = config.timeout_s
        self._verify_every = config.verify_every
        self._num_runs = 0

    def open(self) -> None:
        """Show every engine process its window and its part of the plan, once.

        Collective over all ranks.

        Raises:
            RuntimeError: the live parameters are not those of the plan; names the first.
        """
        messages = self._group.gather(self._mover.open_message(self._back))
        if self._engine is not None:
            self._engine.call_loader(self._of_my_engine(messages))
        self._group.gather(None)  # the leader has called
        self._mover.window.wait_opened(self._timeout_s, self._poll)

    def run(self, *, version: int, step: int) -> None:
        """Bring all engines to ``version``. Collective over all ranks.

        Raises:
            RuntimeError: a transfer or an engine failed, or a verification found a difference;
                that engine refuses to generate until a later update has completed.
        """
        verify = self._verify_every > 0 and self._num_runs % self._verify_every == 0
        self._num_runs += 1
        spend = self._gate.clock.spend
        with self._gate.phase(Phase.RESHARD, step):
            with spend(Cause.RESHARD_VERIFY):
                self._probe.score_trained()
            with spend(Cause.PEERS):
                messages = self._group.gather(self._mover.update_message(verify=verify))
            if self._engine is not None:
                self._engine.begin_update(self._of_my_engine(messages), self._timeout_s)
            stats = self._mover.run(self._poll, verify=verify)
            self._count(stats)
            if self._record is not None:
                with spend(Cause.RESHARD_VERIFY):
                    self._record.take(verify=verify)
            with spend(Cause.PEERS):
                self._meet(stats)
            if self._engine is not None:
                with spend(Cause.RESHARD_WRITE):
                    self._engine.end_update(version)
            self._on_version(version)
        self._on_stats(stats)

    def _count(self, stats: MoveStats) -> None:
        for cause, seconds in (
            (Cause.RESHARD_PACK, stats.pack_s + stats.local_s),
            (Cause.RESHARD_WIRE, stats.wire_s),
            (Cause.RESHARD_WRITE, stats.write_s),
            (Cause.RESHARD_VERIFY, stats.verify_s),
        ):
            self._gate.clock.move(Cause.RESHARD, cause, seconds)

    def _meet(self, stats: MoveStats) -> None:
        """Until here every rank may have failed; no engine serves before none has."""
        fault = first_fault(self._group, stats.faults)
        if not fault:
            return
        if self._engine is not None:
            self._engine.abandon_update()
        raise RuntimeError(f"the reshard was verified and is wrong: {fault}")

    def _poll(self) -> None:
        if self._engine is not None:
            self._engine.poll()

    def _of_my_engine(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return of_engine(messages, self._layout, self._group.world.rank)


def of_engine(
    messages: list[dict[str, Any]], layout: RolloutLayout, rank: int
) -> list[dict[str, Any]]:
    """Those of all ranks of the engine that ``rank`` belongs to."""
    return [messages[r] for r in layout.engine_ranks(layout.coord(rank).engine)]


def first_fault(group: PhaseGroup, faults: Sequence[str]) -> str:
    """The first fault that any rank has found, with its rank; empty if none has. Collective."""
    found = group.gather(tuple(faults))
    told = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return told[0] + more if told else ""
