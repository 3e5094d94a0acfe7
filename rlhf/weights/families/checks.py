"""Which layouts a model admits; every fault at once, before any process group exists."""

from __future__ import annotations

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.weights.families.family import Family
from rlhf.weights.model_shape import ModelShape


def _indivisible(key: str, parts: int, sizes: dict[str, int]) -> list[str]:
    return [
        f"{key}={parts} must divide {name}={size}; set it to a divisor of {size}"
        for name, size in sizes.items()
        if size % parts
    ]


def check_train(shape: ModelShape, layout: TrainLayout) -> None:
    """
    Raises:
        LayoutError: Megatron cannot cut this model so.
    """
    faults = _indivisible(
        "train.tp", layout.tp, {"num_attention_heads": shape.num_heads, "ffn size": shape.ffn_size}
    )
    if shape.num_kv_heads < layout.tp:
        faults.append(
            f"train.tp={layout.tp} must be at most num_key_value_heads={shape.num_kv_heads}: "
            f"training does not replicate KV heads; set train.tp to {shape.num_kv_heads} or less"
        )
    else:
        faults += _indivisible("train.tp", layout.tp, {"num_key_value_heads": shape.num_kv_heads})
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
    attention_tp = layout.tp // layout.dp
    key = "rollout.tp" if layout.dp == 1 else "rollout.tp/rollout.dp"
    faults = _indivisible(key, attention_tp, {"num_attention_heads": shape.num_heads})
    faults += _indivisible("rollout.tp", layout.tp, {"ffn size": shape.ffn_size})
    kv_heads = shape.num_kv_heads
    if max(kv_heads, attention_tp) % min(kv_heads, attention_tp):
        faults.append(
            f"{key}={attention_tp} must divide num_key_value_heads={kv_heads}, or be a multiple "
            "of it"
        )
    faults += _indivisible("rollout.tp", layout.tp, {"padded vocabulary": engine_vocab(shape)})
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
