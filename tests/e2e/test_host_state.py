"""``memory.optimizer: host``: a run repeats that of a state on the device; each goes on as other.

bfloat16 with float32 masters, data parallel, buffers of 1 MiB.
"""

import shutil

import pytest

from tests.e2e.test_ppo import ppo_config
from tests.e2e.test_runs import numbers
from tests.helpers.runs import rlhf, tiny_config

SAVED = "run/checkpoints/step_00000002"
HOST = ("memory.optimizer=host", "memory.stream_mib=1")


def _run(folder, *overrides, saved_by=None):
    """Metrics of each step; from the second on if another run's checkpoint is there."""
    config = tiny_config(
        folder,
        num_steps=4,
        model={"path": str(folder / "model"), "dtype": "bfloat16"},
        train={"pp": 1},
        batch={"updates_per_step": 2},
        checkpoint={"every": 2},
    )
    if saved_by is not None:
        shutil.copytree(saved_by / SAVED, folder / SAVED)
    status, _, err = rlhf("train", str(config), *overrides)
    assert status == 0, err
    return [line for line in numbers(folder / "run") if "step" in line]


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    return folder, _run(folder)


def test_a_run_goes_on_with_its_state_on_the_host(device, tmp_path):
    folder, steps = device
    assert len(steps) == 4
    assert len({line["optim/grad_norm"] for line in steps}) > 1
    assert _run(tmp_path, *HOST, saved_by=folder) == steps[2:]


@pytest.mark.slow
def test_a_run_with_its_state_on_the_host_is_the_same_from_first_to_last(device, tmp_path):
    _, steps = device
    assert _run(tmp_path / "host", *HOST) == steps
    assert _run(tmp_path / "back", saved_by=tmp_path / "host") == steps[2:]


@pytest.mark.slow
def test_a_critic_has_its_state_on_the_host_too(tmp_path):
    """PPO in float32, where only the moments move."""
    runs = []
    for name, overrides in (("device", ()), ("host", HOST)):
        status, _, err = rlhf("train", str(ppo_config(tmp_path / name)), "num_steps=2", *overrides)
        assert status == 0, err
        runs.append([line for line in numbers(tmp_path / name / "run") if "step" in line])
    assert "critic/grad_norm" in runs[0][-1]
    assert runs[0] == runs[1]
