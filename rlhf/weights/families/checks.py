"""Which layouts a model admits; every fault at once, before any process group exists."""

from __future__ import annotations

from rlhf.dist.layout import (
    LayoutError,
    RolloutLayout,
    TrainLayout,
    division_faults,
    engine_cut_faults,
    train_cut_faults,
)
from rlhf.weights.families.family import Family
from rlhf.weights.model_shape import ModelShape


def check_train(shape: ModelShape, layout: TrainLayout) -> None:
    """
    Raises:
        LayoutError: Megatron cannot cut this model so.
    """
    sizes = (shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    faults = list(train_cut_faults(layout.tp, *sizes))
    if layout.pp > shape.num_layers:
        faults.append(
            f"train.pp={layout.pp} must be at most the number of layers, {shape.num_layers}"
        )
    if faults:
        raise LayoutError(faults)


def check_rollout(shape: ModelShape, family: Family, layout: RolloutLayout) -> None:
    """
    Raises:
        LayoutError: SGLang cannot cut this model so.
    """
    sizes = (shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    faults = list(engine_cut_faults(layout.tp, layout.dp, *sizes))
    vocabulary = {"padded vocabulary": engine_vocab(shape)}
    faults += division_faults("rollout.tp", layout.tp, vocabulary)
    if layout.dp > 1 and not family.attention_dp:
        faults.append(
            f"rollout.dp={layout.dp} must be 1: SGLang's {shape.family} has no DP-attention"
        )
    if layout.ep > 1:
        faults.append(f"rollout.ep={layout.ep} must be 1: {shape.family} has no experts")
    if layout.pp > shape.num_layers:
        faults.append(
            f"rollout.pp={layout.pp} must be at most the number of layers, {shape.num_layers}"
        )
    if layout.pp > 1 and shape.tied_embeddings and not family.tied_rollout_pp:
        faults.append(
            f"rollout.pp={layout.pp} must be 1: SGLang's {shape.family} has no head on the last "
            "stage when embeddings are tied"
        )
    if faults:
        raise LayoutError(faults)


def pad_vocab(vocab_size: int, multiple: int, tp: int) -> int:
    """Rows of a vocabulary tensor so that each of ``tp`` ranks has the same multiple of rows."""
    step = multiple * tp
    return (vocab_size + step - 1) // step * step


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Rows of Megatron's vocabulary tensors over all tp ranks."""
    return pad_vocab(shape.vocab_size, 1, tp)


def engine_vocab(shape: ModelShape) -> int:
    """Rows of SGLang's vocabulary tensors over all tp ranks: the next multiple of 64."""
    return pad_vocab(shape.vocab_size, 64, 1)
