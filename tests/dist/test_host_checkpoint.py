"""A checkpoint does not tell where the optimizer state was: saved and loaded by either form.

Both forms write the same, and go on with the same numbers in the layout that loads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.parity_case import Case
from tests.dist.test_host_optimizer import FEW_BYTES, state_of
from tests.dist.training_case import Training
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

BF16 = "bfloat16"
MOE = {"moe": {"bias_update_rate": 0.01}}
SP = {"tp": 2, "sequence_parallel": True}
FORMS = {"device": None, "host": FEW_BYTES}
MOVES = {
    "qwen2": [
        (Case("dp2 bf16", dtype=BF16), Case("pp2 vpp2 bf16", {"pp": 2, "vpp": 2}, dtype=BF16)),
        (Case("tp2", {"tp": 2}), Case("dp2")),
    ],
    "deepseek_v3": [
        (
            Case("tp2 ep2 bf16", {**MOE, **SP, "ep": 2, "etp": 1}, dtype=BF16),
            Case("dp2 moe bf16", MOE, micro=2, dtype=BF16),
        ),
    ],
}
PAIRS = [(a.name, b.name) for moves in MOVES.values() for a, b in moves]


def _to_write(run):
    """Bytes of the tensors of the optimizer state that this rank writes, and of their storages."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from rlhf.mcore.checkpoint import _model_state, _moments

    moments = _moments(_model_state(run.model), run.optimizer, is_loading=False)
    held = [part.data for part in nested_values(moments) if not part.data.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(t.nbytes for t in held), sum(storages.values())


def _move(rank, world, folder, target, case, other):
    from rlhf.mcore import parallel
    from rlhf.mcore.checkpoint import load_state, save_state

    out = {}
    for saved, size in FORMS.items():
        place = target / saved
        place.mkdir(parents=True, exist_ok=True)
        run = Training(rank, world, folder, case, size)
        run.train(2)
        save_state(place, run.model, run.optimizer)
        out[saved, "to write"] = _to_write(run)
        out["elements"] = sum(p.numel() for p in run.model.params.values() if p.requires_grad)
        out[saved] = state_of(run)
        out[saved, "on"] = run.train(2)
        parallel.shutdown()
        for layout in (case, other):
            for form, size in FORMS.items():
                run = Training(rank, world, folder, layout, size)
                load_state(place, run.model, run.optimizer)
                state = state_of(run)
                out[saved, layout.name, form] = (state, run.train(2))
                parallel.shutdown()
    return out


def _run_all(rank, world, folders, target):
    from rlhf.platform.megatron_cpu import install

    install()
    out = {}
    for family, folder in folders.items():
        for i, (case, other) in enumerate(MOVES[family]):
            place = Path(target) / f"{family}-{i}"
            out[case.name, other.name] = _move(rank, world, Path(folder), place, case, other)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    settings = {"qwen2": {"vocab_size": 515, "hidden_size": 96}, "deepseek_v3": {}}
    folders = {name: str(make_tiny(root / name, name, **more)) for name, more in settings.items()}
    return run_ranks(_run_all, 2, folders, str(tmp_path_factory.mktemp("saved")), timeout_s=400)


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_either_form_goes_on_from_what_either_saved(results, pair):
    for rank in results:
        got = rank[pair]
        assert got["host"] == got["device"]
        assert got["host", "to write"] == got["device", "to write"]
        state, on = got["device"], got["device", "on"]
        for saved in FORMS:
            for form in FORMS:
                assert got[saved, pair[0], form] == (state, on)


@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_another_layout_has_the_same_state_in_either_form(results, pair):
    for rank in results:
        got = rank[pair]
        expected = got["device", pair[1], "device"]
        for saved in FORMS:
            for form in FORMS:
                assert got[saved, pair[1], form] == expected


def test_a_state_to_write_is_on_the_rank_that_writes_it_and_there_once(results):
    pair, state_bytes = PAIRS[0], 4 + 4 + 4
    first, second = (rank[pair]["host", "to write"] for rank in results)
    expected = state_bytes * results[0][pair]["elements"]
    assert first == (expected, expected)
    assert second == (0, 0)
