"""Which layouts a model admits; every fault at once, before any process group exists.

Messages begin with the key that is at fault, as in a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.dist.layout import (
    LayoutError,
    RolloutLayout,
    TrainLayout,
    division_faults,
    listed,
)
from rlhf.weights.families.table import family_of
from rlhf.weights.model_shape import ModelShape


def check_train(shape: ModelShape, layout: TrainLayout) -> None:
    """
    Raises:
        LayoutError: Megatron cannot cut this model so.
    """
    if faults := list(train_faults(shape, layout)):
        raise LayoutError(faults)


def check_rollout(shape: ModelShape, layout: RolloutLayout) -> None:
    """
    Raises:
        LayoutError: SGLang cannot cut this model so.
    """
    if faults := list(rollout_faults(shape, layout)):
        raise LayoutError(faults)


def train_faults(shape: ModelShape, layout: TrainLayout) -> Iterator[str]:
    """Why Megatron cannot cut this model so. It copies no KV heads."""
    sizes = {"attention heads": shape.num_heads}
    if shape.mla is None:
        sizes["KV heads"] = shape.num_kv_heads
    sizes |= _ffn_sizes(shape)
    yield from division_faults("train.tp", layout.tp, sizes)
    if layout.pp > shape.num_layers:
        yield f"train.pp={layout.pp} must be at most the number of layers, {shape.num_layers}"
    if shape.moe is None:
        if layout.ep > 1:
            yield f"train.ep: must be 1, is {layout.ep}: {shape.family} has no experts"
        if layout.etp is not None:
            yield f"train.etp: must be left out, is {layout.etp}: {shape.family} has no experts"
        return
    yield from division_faults("train.ep", layout.ep, {"experts": shape.moe.num_experts})
    name = "train.etp" if layout.etp is not None else "train.etp, which defaults to train.tp"
    ffn = {"expert feed-forward size": shape.moe.ffn_size}
    yield from division_faults(name, layout.expert_tp, ffn)


def rollout_faults(shape: ModelShape, layout: RolloutLayout) -> Iterator[str]:
    """Why SGLang cannot cut this model so."""
    family = family_of(shape)
    yield from _engine_tp_faults(shape, layout)
    yield from _engine_expert_faults(shape, layout)
    if layout.dp > 1 and not family.attention_dp:
        yield (
            f"rollout.dp: must be 1, is {layout.dp}: SGLang's {shape.family} has no DP-attention; "
            "lower rollout.tp for more engines instead"
        )
    if layout.pp > shape.num_layers:
        yield f"rollout.pp: {layout.pp} must be at most the number of layers, {shape.num_layers}"
    if layout.pp > 1 and shape.tied_embeddings and not family.tied_engine_stages:
        yield (
            f"rollout.pp: must be 1, is {layout.pp}: SGLang's {shape.family} has no head on the "
            "last stage when embeddings are tied"
        )


def _engine_tp_faults(shape: ModelShape, layout: RolloutLayout) -> Iterator[str]:
    """SGLang may copy KV heads: the ranks of an attention group divide them or are a multiple."""
    heads, kv_heads, dp = shape.num_heads, shape.num_kv_heads, layout.dp
    ffn_sizes = _engine_ffn_sizes(shape, layout)

    def fits(tp: int) -> bool:
        attention_tp = max(1, tp // dp)
        return (
            heads % attention_tp == 0
            and all(size % tp == 0 for size in ffn_sizes.values())
            and (kv_heads % attention_tp == 0 or attention_tp % kv_heads == 0)
            and engine_vocab(shape) % attention_tp == 0
        )

    if fits(layout.tp):
        return
    over = f" (attention: rollout.tp/rollout.dp={layout.attention_tp})" if dp > 1 else ""
    must = [f"{heads} attention heads", *(f"{name} {n}" for name, n in ffn_sizes.items())]
    must.append(f"padded vocabulary {engine_vocab(shape)}")
    kv = f", and divide its {kv_heads} KV heads or be a multiple of them" if not shape.mla else ""
    yield (
        f"rollout.tp: {layout.tp}{over} must divide the model's {', '.join(must)}{kv}; "
        f"set it to one of {listed(t for t in range(dp, heads * dp + 1, dp) if fits(t))}"
    )


def _engine_expert_faults(shape: ModelShape, layout: RolloutLayout) -> Iterator[str]:
    if shape.moe is None:
        if layout.ep > 1:
            yield f"rollout.ep: must be 1, is {layout.ep}: {shape.family} has no experts"
        if layout.a2a != "none":
            yield f"rollout.a2a: must be none, is {layout.a2a}: {shape.family} has no experts"
        if layout.redundant_experts:
            yield (
                f"rollout.redundant_experts: must be 0, is {layout.redundant_experts}: "
                f"{shape.family} has no experts"
            )
        return
    yield from _redundant_expert_faults(shape, shape.moe.num_experts, layout)
    experts, ffn = shape.moe.num_experts + layout.redundant_experts, shape.moe.ffn_size

    def fits(ep: int) -> bool:
        return experts % ep == 0 and layout.tp % ep == 0 and ffn % (layout.tp // ep) == 0

    if not fits(layout.ep):
        allowed = listed(ep for ep in range(1, layout.tp + 1) if fits(ep))
        names = f"{shape.moe.num_experts} experts"
        if layout.redundant_experts:
            names += f" and {layout.redundant_experts} redundant ones, {experts} together"
        yield (
            f"rollout.ep: {layout.ep} must divide the model's {names}, and "
            f"rollout.tp/rollout.ep={layout.expert_tp} its expert feed-forward size {ffn}; set it "
            f"to one of {allowed or '(none: change rollout.tp)'}"
        )
    if layout.a2a == "deepep" and layout.ep != layout.tp:
        yield (
            f"rollout.ep: must equal rollout.tp={layout.tp} while rollout.a2a is deepep, is "
            f"{layout.ep}"
        )


def _redundant_expert_faults(
    shape: ModelShape, experts: int, layout: RolloutLayout
) -> Iterator[str]:
    """A rank never needs two copies of an expert."""
    if layout.redundant_experts and not family_of(shape).redundant_experts:
        yield (
            f"rollout.redundant_experts: must be 0, is {layout.redundant_experts}: SGLang's "
            f"{shape.family} has no room for them"
        )
    most = experts * (layout.ep - 1)
    if layout.redundant_experts > most:
        yield (
            f"rollout.redundant_experts: must be at most experts*(rollout.ep-1)={most}, is "
            f"{layout.redundant_experts}: a rank would hold an expert twice"
        )


def _ffn_sizes(shape: ModelShape) -> dict[str, int]:
    """Of the MLPs that lie over tp: those of layers without experts, shared experts."""
    out = {}
    if not shape.has_experts(0):
        out["feed-forward size"] = shape.ffn_size
    if shape.moe is not None and shape.moe.num_shared_experts:
        out["shared experts' size"] = shape.moe.num_shared_experts * shape.moe.ffn_size
    return out


def _engine_ffn_sizes(shape: ModelShape, layout: RolloutLayout) -> dict[str, int]:
    out = _ffn_sizes(shape)
    if shape.moe is not None and layout.dp > 1:
        out.pop("feed-forward size", None)
    if layout.a2a == "deepep":
        out.pop("shared experts' size", None)
    return out


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
