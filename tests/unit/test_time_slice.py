"""Memory changes hands by the table: values are kept, copies are made once, errors tell."""

import logging

import pytest
import torch

from rlhf.config.schema import MemorySection
from rlhf.memory.ledger import Ledger, ledger_metrics, ledger_text
from rlhf.memory.released import Storages
from rlhf.memory.table import RESTORE, Region, Span, residency, switches
from rlhf.memory.time_slice import TimeSlice
from rlhf.memory.weights import FromEngine, FromMasters, HostCopy, Weights
from rlhf.rollout.engine_state import ALL_PARTS, EngineState, Need, Use
from rlhf.track.metrics import values

TABLE = residency(MemorySection(time_slice="all"), ("reference", "critic"))
SIZE = 4096


def _params(start: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((SIZE,), start), "b": torch.full((3, 5), start + 1)}


def _slice(table=TABLE, predicted=None) -> TimeSlice:
    return TimeSlice(table, Ledger(table, predicted or {}))


def _enter(time_slice: TimeSlice, *phases: tuple[str, str]) -> None:
    for phase, role in phases:
        time_slice.enter(phase, role)
        time_slice.leave(phase, role, None)


def test_a_role_has_memory_in_its_own_phases_only_and_the_same_values():
    time_slice, params, critic = _slice(), _params(1.0), _params(5.0)
    time_slice.add(Weights(Region.REFERENCE, params, HostCopy()))
    time_slice.add(Weights(Region.CRITIC, critic, HostCopy()))
    before = {name: param.clone() for name, param in params.items()}
    for _ in range(3):
        time_slice.enter("rollout")
        assert time_slice.ledger.measured() == {}
        time_slice.enter("score", "reference")
        assert set(time_slice.ledger.measured()) == {Region.REFERENCE}
        assert all(torch.equal(params[n], before[n]) for n in params)
        time_slice.enter("pack")  # no phase of the table: all stays
        assert set(time_slice.ledger.measured()) == {Region.REFERENCE}
        time_slice.enter("update", "critic")
        assert set(time_slice.ledger.measured()) == {Region.CRITIC}
        critic["a"] += 1
    time_slice.enter("rollout")
    time_slice.enter("save")
    assert critic["a"][0] == 8.0


def test_a_copy_is_one_buffer_for_good_and_written_only_after_a_change():
    params, copy = _params(1.0), HostCopy()
    time_slice = _slice()
    time_slice.add(Weights(Region.CRITIC, params, copy))
    time_slice.enter("rollout")
    first = copy.buffer.data_ptr()
    assert copy.host_bytes == sum(p.nbytes for p in params.values())
    time_slice.enter("score", "critic")
    params["a"].fill_(7.0)  # outside an update: the copy need not know
    time_slice.enter("rollout")
    time_slice.enter("update", "critic")
    assert params["a"][0] == 1.0
    params["a"].fill_(9.0)
    time_slice.enter("rollout")
    time_slice.enter("score", "critic")
    assert params["a"][0] == 9.0
    assert copy.buffer.data_ptr() == first


def test_weights_from_masters_are_written_anew():
    params = _params(0.0)

    def write() -> None:
        for name, param in params.items():
            assert not param.any(), "memory comes back as zeros"
            param.fill_(float(len(name)))

    time_slice = _slice()
    time_slice.add(Weights(Region.CRITIC, params, FromMasters(write)))
    _enter(time_slice, ("rollout", ""), ("score", "critic"))
    assert all((param == 1.0).all() for param in params.values())


def test_only_served_weights_may_leave_for_the_engine():
    """From a reshard to the next update: then the engine has them."""
    table = residency(MemorySection(time_slice="all"), (), from_engine=True)
    params = _params(2.0)
    time_slice = _slice(table)
    way = FromEngine(params, {"b": 2}, lambda: params["a"].fill_(2.0))
    time_slice.add(Weights(Region.ACTOR, params, way))
    _enter(time_slice, ("reshard", ""), ("rollout", ""))
    assert time_slice.ledger.measured() == {}
    _enter(time_slice, ("reshard", ""))
    assert params["b"].tolist() == [[0.0] * 5] * 2 + [[3.0] * 5], "kept rows; nobody moved the rest"
    _enter(time_slice, ("update", "actor"))
    with pytest.raises(RuntimeError, match="written since the last reshard"):
        time_slice.enter("rollout")


def test_the_way_from_a_rollout_leads_through_restore_if_only_the_engine_has_the_weights():
    serving = frozenset({Region.ENGINE, Region.DERIVED, Region.KV_CACHE})
    known = serving | {Region.ACTOR, Region.GRADIENTS}
    table = residency(MemorySection(time_slice="all"), ("reward_model",), from_engine=True)
    for span in (Span("SCORE", "reward_model"), Span("SCORE", "actor")):
        first, second = switches(table, serving, known, span)
        assert (first.span, first.release) == (RESTORE, {Region.KV_CACHE})
        assert first.restore == {Region.ACTOR}
        assert second.release == {Region.ENGINE, Region.DERIVED}
    (save,) = switches(table, serving, known, Span("SAVE"))
    assert save.span == RESTORE and not save.release & {Region.ENGINE}
    assert switches(table, serving, known, Span("EVAL")) == []


def test_a_phase_over_its_prediction_names_the_region(caplog):
    params = _params(1.0)
    size = sum(p.nbytes for p in params.values())
    predicted = {Region.REFERENCE: size, Region.CRITIC: size // 2}
    for phases, names in (
        ([("score", "reference")], []),
        ([("score", "critic")], [str(Region.CRITIC)]),
    ):
        time_slice = _slice(predicted=predicted)
        time_slice.add(Weights(Region.REFERENCE, _params(1.0), HostCopy()))
        time_slice.add(Weights(Region.CRITIC, _params(1.0), HostCopy()))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _enter(time_slice, *phases)
        assert [name for r in caplog.records for name in names if name in r.message] == names
        assert len(caplog.records) == len(names)
        entries = time_slice.ledger.take()
        over = {k: v for k, v in values(ledger_metrics(entries, 0)).items() if "over" in k}
        assert over == ({"memory/over/critic_weights": pytest.approx(1.0)} if names else {})
        assert str(entries[0].span) in ledger_text(entries)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_an_error_of_memory_has_the_ledger_with_it(error):
    time_slice = _slice(predicted={Region.REFERENCE: 2 * 2**20})
    time_slice.add(Weights(Region.REFERENCE, _params(1.0), HostCopy()))
    time_slice.enter("score", "reference")
    time_slice.leave("score", "reference", error)
    (note,) = error.__notes__
    assert "in SCORE(reference)" in note
    assert "reference" in note.splitlines()[1] and "2.0" in note.splitlines()[1]


def test_other_errors_stay_as_they_are():
    time_slice, error = _slice(), RuntimeError("a tensor has another shape")
    time_slice.leave("score", "actor", error)
    assert not hasattr(error, "__notes__")


def test_the_allocators_own_error_is_known():
    """The words are torch's."""
    ledger = Ledger(TABLE, {})
    with pytest.raises(RuntimeError) as caught, ledger.explaining("here"):
        torch.empty(2**62, dtype=torch.uint8)
    assert "memory of this rank here" in caught.value.__notes__[0]


def test_storages_are_given_up_once_whoever_views_them():
    base = torch.arange(12.0)
    storages = Storages({"left": base[:5], "right": base[5:].view(7)})
    assert storages.num_bytes == storages.resident_bytes == base.nbytes
    storages.release()
    assert storages.resident_bytes == 0
    storages.take_back()
    assert storages.resident_bytes == 48 and not base.any()


def test_memory_that_is_not_free_on_every_rank_is_not_taken():
    state = EngineState()
    state.begin(reads=False)
    state.complete(3)
    assert state.missing(Use.GENERATE) is None
    fresh = state.release(ALL_PARTS)
    assert state.missing(Use.ALLOCATE) is Need.RELEASE
    state.released(fresh)
    assert state.missing(Use.ALLOCATE) is None
    assert state.missing(Use.UPDATE) is Need.RESUME
    assert state.release(ALL_PARTS) == frozenset(), "it has nothing left"
    state.resume(frozenset({"weights"}))
    assert state.missing(Use.UPDATE) is None
    assert state.missing(Use.READ) is Need.WEIGHT_SYNC
    state.begin(reads=False)
    state.complete(4)
    assert state.missing(Use.READ) is None
    assert state.missing(Use.GENERATE) is Need.RESUME_CACHE
    state.resume(ALL_PARTS)
    assert state.missing(Use.GENERATE) is None and state.version == 4
