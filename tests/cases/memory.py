"""Operations on memory that is used in turn."""

from typing import Any

import torch

from rlhf.memory.released import Storages
from rlhf.memory.table import peak_of
from rlhf.memory.weights import HostCopy
from rlhf.rollout.engine_state import ALL_PARTS, EngineState, Use
from tests.cases.case import Case, Op


def phase_peak_memory(case: Case) -> Case:
    peak = peak_of(case["steps"], case["capacity_gib"])
    return {"peak_gib": peak.size, "fits": peak.fits, "first_overflow": peak.first_overflow}


def engine_state_machine(case: Case) -> Case:
    """An engine that serves, and what happens to it until something is refused."""
    state = EngineState()
    state.begin(reads=False)
    state.complete(0)
    for event in case["events"]:
        missing = None
        if event == "release called":
            state.release(ALL_PARTS)
        elif event == "release really done":
            state.released(ALL_PARTS)
        elif event == "release weights":
            state.released(state.release(frozenset({"weights"})))
        elif event == "resume weights":
            state.resume(frozenset({"weights"}))
        elif event == "generate":
            missing = state.missing(Use.GENERATE)
        else:
            assert event.startswith("train allocates"), event
            missing = state.missing(Use.ALLOCATE)
        if missing is not None:
            return {"allowed": False, "missing": str(missing)}
    return {"allowed": True, "missing": None}


def host_pinned_peak(case: Case) -> Case:
    """Weights that change, leave and come back; all buffers that the copy ever had."""
    weights = torch.zeros(case["param_bytes"], dtype=torch.uint8)
    storages, copy = Storages({"weights": weights}), HostCopy()
    buffers: dict[int, Any] = {}
    for number in range(case["offload_count"]):
        weights.fill_(number)
        copy.keep(storages, changed=True)
        storages.release()
        assert copy.buffer is not None
        buffers[copy.buffer.data_ptr()] = copy.buffer
        storages.take_back(zero=False)
        copy.bring(storages)
        assert bool((weights == number).all())
    return {"peak_pinned_bytes": sum(buffer.nbytes for buffer in buffers.values())}


OPS: dict[str, Op] = {
    "phase_peak_memory": phase_peak_memory,
    "engine_state_machine": engine_state_machine,
    "host_pinned_peak": host_pinned_peak,
}
