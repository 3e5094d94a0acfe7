"""Everything that can be known to be wrong before a process group exists."""

from __future__ import annotations

from rlhf.config.check import check_config
from rlhf.config.schema import Config
from rlhf.weights.families import full_shapes
from rlhf.weights.hf_checkpoint import check_index
from rlhf.weights.model_shape import ModelShape, load_model_shape


def check(config: Config, world: int, source: str) -> ModelShape:
    """The model's shape, after the configuration has been held against it and the world size.

    Raises:
        ValueError: all faults at once.
    """
    shape = load_model_shape(config.model.path)
    check_config(config, shape, world, source)
    check_index(config.model.path, full_shapes(shape))
    return shape
