"""The planner's bytes on disk against a state that is really written."""

from pathlib import Path

import pytest

from rlhf.dist.layout import TrainLayout
from rlhf.planner.train_memory import disk_bytes
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny


def write(rank, world, model_folder, folder, dtype):
    from rlhf.config.schema import ModelSection, OptimizerSection, TrainSection
    from rlhf.mcore import parallel
    from rlhf.mcore.checkpoint import save_state
    from rlhf.mcore.model import build_model
    from rlhf.mcore.optimizer import build_optimizer
    from rlhf.platform.megatron_cpu import install

    install()
    layout = TrainLayout(world)
    parallel.initialize(layout, timeout_s=60, seed=1)
    model = build_model(
        load_model_shape(model_folder),
        layout,
        ModelSection(path=model_folder, dtype=dtype),
        TrainSection(),
        trainable=True,
    )
    save_state(Path(folder), model, build_optimizer(model, OptimizerSection(lr=1e-3), 1))


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float32", 4)])
def test_a_saved_state_has_each_weight_its_master_and_its_moments(tmp_path, dtype, itemsize):
    model = make_tiny(tmp_path / "model", "deepseek_v3", hidden_size=256, vocab_size=8192)
    folder = tmp_path / "state"
    folder.mkdir()
    run_ranks(write, 2, str(model), str(folder), dtype)
    written = sum(path.stat().st_size for path in folder.iterdir())
    planned = disk_bytes(load_model_shape(model), itemsize).state
    assert planned < written < 1.03 * planned  # names and places of the pieces come on top
