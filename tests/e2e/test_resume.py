"""A saved run goes on elsewhere: on another number of ranks, or with the reason why it cannot."""

import shutil

import numpy as np
import pytest

from tests.e2e.test_runs import numbers
from tests.helpers.runs import rlhf, tiny_config
from tests.helpers.tiny_models import make_tiny

SAVED = "run/checkpoints/step_00000002"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps on two ranks, PP2 training, two engines."""
    folder = tmp_path_factory.mktemp("whole")
    status, _, err = rlhf("train", str(_config(folder)))
    assert status == 0, err
    return folder


def _config(folder, **sections):
    return tiny_config(folder, num_steps=4, checkpoint={"every": 2}, **sections)


def _steps(folder):
    return [line for line in numbers(folder / "run") if line.get("step") in (2, 3)]


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_on_one(whole, tmp_path):
    """The same prompts and answers, and the numbers of the run that went on, to 1e-5."""
    config = _config(tmp_path, dist={"ranks": 1}, train={"pp": 1})
    shutil.copytree(whole / SAVED, tmp_path / SAVED)
    status, _, err = rlhf("train", str(config))
    assert status == 0, err
    (line,) = err.strip().splitlines()
    assert "dist.ranks: 2 -> 1" in line
    for got, expected in zip(_steps(tmp_path), _steps(whole), strict=True):
        shared = got.keys() & expected.keys()
        assert {"reward/mean", "optim/grad_norm", "step"} <= shared
        for name in sorted(shared):
            np.testing.assert_allclose(
                got[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.slow
def test_another_model_is_refused_before_a_rank_starts(whole, tmp_path):
    config = _config(tmp_path)
    shutil.copytree(whole / SAVED, tmp_path / SAVED)
    other = make_tiny(tmp_path / "other", "llama", num_hidden_layers=6)
    status, out, err = rlhf("train", str(config), f"model.path={other}", limit_s=60)
    assert (status, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert "model.path: the actor must be the one that was saved" in line
    assert "num_layers: 4 -> 6" in line
