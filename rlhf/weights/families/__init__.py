"""How each model family's weights lie in Megatron and in SGLang, as tables, and their reader."""

from rlhf.weights.families.bands import reshard_spread, restore_spread
from rlhf.weights.families.block_cuts import (
    check_blocks,
    engine_block_faults,
    train_block_faults,
)
from rlhf.weights.families.checks import (
    check_rollout,
    check_train,
    engine_vocab,
    pad_vocab,
    padded_vocab,
    rollout_faults,
    train_faults,
)
from rlhf.weights.families.grids import local_experts
from rlhf.weights.families.layouts import (
    engine_layers,
    full_pieces,
    full_shapes,
    mtp_layers,
    rollout_bytes,
    rollout_padding_params,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)

__all__ = [
    "check_blocks",
    "check_rollout",
    "check_train",
    "engine_block_faults",
    "engine_layers",
    "engine_vocab",
    "full_pieces",
    "full_shapes",
    "local_experts",
    "mtp_layers",
    "pad_vocab",
    "padded_vocab",
    "reshard_spread",
    "restore_spread",
    "rollout_bytes",
    "rollout_faults",
    "rollout_padding_params",
    "rollout_param_shapes",
    "rollout_pieces",
    "train_block_faults",
    "train_faults",
    "train_param_shapes",
    "train_pieces",
]
