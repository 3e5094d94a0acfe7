"""A checkpoint of one number of ranks continues the run on another one, to 1e-5.

From two ranks to one in ``make test``; from one and over four in ``make test-full``.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.dist.parity_case import Case
from tests.dist.training_case import Training
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

SP = {"tp": 2, "sequence_parallel": True}
MOE = {"moe": {"bias_update_rate": 0.01}}
MODELS = {"dense": "qwen2", "experts": "deepseek_v3"}
CASES = {  # model, ranks -> layouts
    ("dense", 1): [Case("one rank")],
    ("dense", 2): [Case("dp2", {"overlap": True}), Case("tp2 sp", SP), Case("pp2", {"pp": 2})],
    ("dense", 4): [Case("dp4", micro=3), Case("tp2 sp pp2", {**SP, "pp": 2})],
    ("experts", 1): [Case("one rank", MOE)],
    ("experts", 2): [Case("ep2", {**MOE, "ep": 2}), Case("tp2 sp", {**MOE, **SP})],
    ("experts", 4): [
        Case("ep4", {**MOE, "ep": 4}, micro=3),
        Case("tp2 sp ep2 pp2", {**MOE, **SP, "ep": 2, "etp": 1, "pp": 2}),
    ],
}
CHEAP = (2, 1)
MOVES = [CHEAP, (1, 2), (4, 2), (4, 1), (2, 4)]


def _place(target, name, world, case):
    return Path(target) / f"{name} {world} {case.name}"


def _save(rank, world, folders, target):
    """Two updates, save, three more, under every layout of this number of ranks."""
    from rlhf.mcore import parallel
    from rlhf.mcore.checkpoint import save_state

    out = {}
    for name, folder in folders.items():
        for case in CASES[name, world]:
            run = Training(rank, world, Path(folder), case)
            run.train(2)
            place = _place(target, name, world, case)
            place.mkdir(exist_ok=True)
            save_state(place, run.model, run.optimizer)
            out[name, case.name] = run.train(3)
            parallel.shutdown()
    return out


def _go_on(rank, world, folders, target, before):
    """Those three updates from every checkpoint of ``before`` ranks, each under one layout."""
    from rlhf.mcore import parallel
    from rlhf.mcore.checkpoint import load_state

    out = {}
    for name, folder in folders.items():
        layouts = itertools.cycle(CASES[name, world])
        for saved, case in zip(_meeting_all(name, before, world), layouts, strict=False):
            run = Training(rank, world, Path(folder), case)
            load_state(_place(target, name, before, saved), run.model, run.optimizer)
            out[name, saved.name, case.name] = run.train(3)
            parallel.shutdown()
    return out


def _meeting_all(name, before, world):
    """The layouts of ``before`` ranks, again until every layout of ``world`` has read one."""
    saved = CASES[name, before]
    count = max(len(saved), len(CASES[name, world]))
    return list(itertools.islice(itertools.cycle(saved), count))


def _run(rank, world, folders, target, before):
    from rlhf.platform.megatron_cpu import install

    install()
    if before is None:
        return _save(rank, world, folders, target)
    return _go_on(rank, world, folders, target, before)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """(ranks, None): what a run that went on did; (ranks, before): what one that loaded did."""
    folders = {
        name: str(make_tiny(tmp_path_factory.mktemp(name), family))
        for name, family in MODELS.items()
    }
    target = tmp_path_factory.mktemp("checkpoints")
    done = {}

    def run(world, before):
        if (world, before) not in done:
            done[world, before] = run_ranks(
                _run, world, folders, str(target), before, timeout_s=400
            )
        return done[world, before]

    return run


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("before", "world"),
    [
        pytest.param(a, b, id=f"{a} to {b}", marks=[pytest.mark.slow] if (a, b) != CHEAP else [])
        for a, b in MOVES
    ],
)
def test_the_next_three_updates_are_those_of_the_run_that_went_on(launch, before, world, name):
    went_on = launch(before, None)[0]
    for rank in launch(world, before):
        loaded = {key: values for key, values in rank.items() if key[0] == name}
        assert {key[1] for key in loaded} == {case.name for case in CASES[name, before]}
        assert {key[2] for key in loaded} == {case.name for case in CASES[name, world]}
        for key, values in loaded.items():
            expected = went_on[name, key[1]]
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=str(key))
