"""Training shards beside a live engine: into it, their memory away, and back out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf.dist.layout import TrainLayout
from rlhf.reshard.execute import Mover
from tests.e2e.engine_case import AREA_BYTES, LIMIT_S, EngineCase
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.round_trips import RoundTrips


class LiveRestore:
    """All ranks of a training layout in threads; the engine's windows are theirs from here on."""

    def __init__(self, case: EngineCase, train: TrainLayout, full: Mapping[str, Tensor]) -> None:
        self._engine = case.engine
        dtype = getattr(torch, case.spec.dtype)
        self.ranks = RoundTrips(
            case.shape,
            train,
            case.layout,
            dtype,
            area_bytes=AREA_BYTES,
            limit_s=LIMIT_S,
            full=full,
        )
        trips = self.ranks.trips
        self._engine.call_loader([trip.open_message() for trip in trips])
        for trip in trips:
            trip.reshard.window.wait_opened(LIMIT_S, self._engine.poll)

    def write(self, version: int) -> None:
        movers = [trip.reshard for trip in self.ranks.trips]
        self._engine.begin_update([mover.update_message() for mover in movers], LIMIT_S)
        self._run(movers)
        self._engine.end_update(version)

    def read(self, while_open: Callable[[], Any]) -> None:
        movers = [trip.restore for trip in self.ranks.trips]
        self._engine.begin_read([mover.update_message() for mover in movers], LIMIT_S)
        while_open()
        self._run(movers)
        self._engine.end_read()

    def tables(self) -> list[dict[str, Any]]:
        """Live parameters of each rank of the engine, with their addresses; after a movement."""
        windows = [trip.reshard.window for trip in self.ranks.trips]
        self._engine.call_loader([{"op": "table"}] * len(windows))
        deadline = time.monotonic() + LIMIT_S
        while any(window.reply() is None for window in windows):  # of later stages
            self._engine.poll()
            assert time.monotonic() < deadline, "no table of some rank"
        return [window.reply() for window in windows]

    def _run(self, movers: list[Mover]) -> None:
        polls = [self._engine.poll, *[no_poll] * (len(movers) - 1)]
        in_threads([partial(m.run, p) for m, p in zip(movers, polls, strict=True)], LIMIT_S)
