"""One device, used in turn: what a phase does not need is away while it runs."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.memory.holder import Holder
from rlhf.memory.ledger import Ledger
from rlhf.memory.table import CHANGES, RESTORE, Region, Regions, Span, Switch, Table, switches


class TimeSlice:
    """Carries out the table at the edges of phases; all ranks together."""

    def __init__(self, table: Table, ledger: Ledger) -> None:
        self._table = table
        self.ledger = ledger
        self._holders: dict[Region, Holder] = {}
        self._there: Regions = frozenset()
        self._changed: Regions = frozenset()

    def add(self, holder: Holder) -> None:
        """Memory that is there now, and from the next edge on only when the table says so."""
        for region in holder.regions:
            assert region not in self._holders, f"{region} has two holders"
            self._holders[region] = holder
        self._there |= holder.regions
        self._changed |= holder.regions
        self.ledger.watch(holder.resident_bytes)

    def rest(self, region: Region) -> None:
        """Give it up at once if the table ever does: for what a start needs later, or never."""
        if any(region not in held for held in self._table.held.values()):
            self._release(frozenset({region}))

    def enter(self, phase: str, role: str = "") -> None:
        """Release and restore. Collective over all ranks.

        What is to be released is given up by all ranks before any takes memory back, so that
        neither an engine nor training finds less than there is for it.
        """
        span = self._table.find(phase, role)
        if span is None:
            return
        known = frozenset(self._holders)
        for switch in switches(self._table, self._there, known, span):
            with self.ledger.explaining(f"on the way to {switch.span}"):
                self._carry_out(switch)
            if switch.span == RESTORE:
                self.ledger.measure(RESTORE)
        self._changed |= CHANGES.get(span, frozenset()) & known

    def leave(self, phase: str, role: str, error: BaseException | None) -> None:
        """Measure what the phase had; an error that tells of memory gets the ledger with it."""
        span = self._table.find(phase, role)
        if span is None:
            return
        if error is not None:
            self.ledger.explain(error, f"in {span}")
            return
        self.ledger.measure(span)
        if span == Span("RESHARD") and RESTORE in self._table.held:
            self._changed -= {Region.ACTOR}

    def _carry_out(self, switch: Switch) -> None:
        self._release(switch.release)
        for holder in self._by_holder(switch.release | switch.restore):
            holder.settle()
        if blocked := [why for h in set(self._holders.values()) if (why := h.blocks())]:
            raise RuntimeError(f"memory for {switch.span} cannot be taken: {'; '.join(blocked)}")
        for holder, regions in self._by_holder(switch.restore).items():
            holder.restore(regions)
            self._there |= regions

    def _release(self, regions: Regions) -> None:
        for holder, part in self._by_holder(regions).items():
            self._there -= part  # also when it fails: nothing may count on it then
            holder.release(part, changed=bool(part & self._changed))
            self._changed -= part

    def _by_holder(self, regions: Regions) -> Mapping[Holder, Regions]:
        """In the order of :class:`Region`, which is the same on all ranks."""
        out: dict[Holder, Regions] = {}
        for region in Region:
            if region in regions:
                holder = self._holders[region]
                out[holder] = out.get(holder, frozenset()) | {region}
        return out
