"""What a real schedule waits for is measured: part of the time of its passes, on every stage."""

from __future__ import annotations

import time
from typing import Any

from tests.dist.parity_case import Case
from tests.dist.training_case import Training
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

LAYOUTS = (
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 1},
)


class Told:
    """Passes on what megatron tells its timers, and keeps the names."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.names: set[str] = set()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        self.names.add(name)
        return self.inner(name, log_level)


def waits_of(rank: int, world: int, folder: str) -> list[tuple[float, float]]:
    """(seconds waited for stages, seconds of all passes) per layout."""
    from rlhf.mcore import parallel
    from rlhf.mcore.forward import logprobs
    from rlhf.mcore.stage_waits import COMPUTATIONS, REDUCTIONS, SCHEDULE, TIED
    from rlhf.platform.megatron_cpu import install

    install()
    out = []
    for layout in LAYOUTS:
        training = Training(rank, world, folder, Case(str(layout), layout))
        assert training.model.config.timers is training.model.stage_waits
        training.model.config.timers = told = Told(training.model.stage_waits)
        began = time.perf_counter()
        logprobs(training.model, training.micro, 1.0)
        scored = training.model.stage_waits.take_s()
        training.train(2)
        updated = training.model.stage_waits.take_s()
        spent_s = time.perf_counter() - began
        assert training.model.stage_waits.take_s() == 0
        assert told.names >= {*COMPUTATIONS, SCHEDULE, REDUCTIONS, TIED}, "megatron has other names"
        assert (scored > 0) == (updated > 0) == (layout["pp"] > 1)
        out.append((scored + updated, spent_s))
        parallel.shutdown()
    return out


def test_waits_for_stages_are_part_of_the_time_of_passes_and_nothing_without_stages(tmp_path):
    make_tiny(tmp_path, "llama")
    for of_rank in run_ranks(waits_of, 2, str(tmp_path)):
        for layout, (waited_s, spent_s) in zip(LAYOUTS, of_rank, strict=True):
            if layout["pp"] > 1:
                assert 0 < waited_s < spent_s, layout
            else:
                assert waited_s == 0
