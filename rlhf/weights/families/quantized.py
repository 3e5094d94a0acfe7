"""The tables of an engine that keeps block-fp8 weights. Pure Python."""

from __future__ import annotations

from dataclasses import replace

from rlhf.weights.block_scales import scale_name
from rlhf.weights.families.family import Block
from rlhf.weights.families.operations import BlockScales, ExpertStack, Fp8Weight, Operation


def quantized(block: Block) -> Block:
    """The block with fp8 parameters in the engine, and behind each of them its scales."""
    rollout: dict[str, Operation] = {}
    for name, operation in block.rollout.items():
        if name not in block.fp8:
            rollout[name] = operation
        elif isinstance(operation, ExpertStack):
            rollout[name] = ExpertStack(Fp8Weight(operation.expert))
            rollout[scale_name(name)] = ExpertStack(BlockScales(operation.expert))
        else:
            rollout[name] = Fp8Weight(operation)
            rollout[scale_name(name)] = BlockScales(operation)
    return replace(block, rollout=rollout)
