"""A model of the same kind with few, narrow layers, as the ``config.json`` that says so. Pure.

What a key says of the structure stays: latent attention, shared experts, dense first layers, groups
of experts, tied embeddings, biases, norms, rotary scaling. Sizes become the smallest that the
smaller layouts divide; layers stay uneven over stages where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from rlhf.dist.layout import TrainLayout
from rlhf.planner.shrink_layout import Layouts
from rlhf.weights.model_shape import ModelShape, MoEShape

HEAD_DIM = 16
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
QUERY_RANK = 48
WIDTH = 32
"""Of a feed-forward part on one rank."""
FEW_ROWS = 320
"""Rows of a vocabulary that nobody's tokenizer decides."""
DROPPED = ("auto_map", "layer_types", "mlp_layer_types", "torch_dtype", "transformers_version")
"""Keys of a ``config.json`` that speak of code or layers that the smaller model lacks."""


@dataclass(frozen=True, slots=True)
class Layers:
    """How many, and where stages cut them. ``first``, ``last``: as in ``TrainLayout``."""

    total: int
    first: int | None
    last: int | None
    vpp: int
    first_dense: int


def shrink_layers(shape: ModelShape, full: TrainLayout, smaller: Layouts) -> Layers:
    """As few layers as keep the stages' kinds: a shorter last stage stays the shorter one, virtual
    chunks stay several, and the first stage has dense layers, experts or both as it has now.

    Raises:
        LayoutError: the configured layout cannot hold the model's layers.
    """
    counts = _per_stage(full, shape.num_layers)
    pp = smaller.train.pp
    vpp = 2 if full.vpp > 1 and pp > 1 else 1
    first, last = (full.first, full.last) if pp > 1 else (None, None)
    middle = next((n for s, n in enumerate(counts) if not _is_end(s, full)), counts[0])
    wanted = [middle] * pp
    wanted[0] = first or wanted[0]
    wanted[-1] = last or wanted[-1]
    levels = sorted(set(wanted))
    for more in count():
        few = [(levels.index(n) + 1 + more) * vpp for n in wanted]
        layout = replace(smaller.train, vpp=vpp, first=first and few[0], last=last and few[-1])
        dense = _first_dense(shape, full, layout, sum(few))
        if dense is not None and sum(few) >= max(2, smaller.rollout.pp):
            return Layers(sum(few), layout.first, layout.last, vpp, dense)
    raise AssertionError("there are always enough layers")


def _per_stage(layout: TrainLayout, layers: int) -> list[int]:
    return [
        sum(len(layout.layers(layers, stage, chunk)) for chunk in range(layout.vpp))
        for stage in range(layout.pp)
    ]


def _is_end(stage: int, layout: TrainLayout) -> bool:
    first = stage == 0 and layout.first is not None
    return first or (stage == layout.pp - 1 and layout.last is not None)


def _first_dense(
    shape: ModelShape, full: TrainLayout, smaller: TrainLayout, layers: int
) -> int | None:
    """So many dense layers that the first stage has the kinds of layers that it has now, and so has
    the model; None: with so few ``layers`` it cannot."""
    dense = shape.moe.first_dense if shape.moe is not None else 0
    wanted = _kinds(full, shape.num_layers, dense)
    for n in range(layers + 1):
        got = _kinds(smaller, layers, n)
        if got == wanted or (smaller.pp == 1 and got[1] == wanted[1]):
            return n
    return None


def _kinds(layout: TrainLayout, layers: int, dense: int) -> tuple[set[bool], set[bool]]:
    """Whether layers have experts: of the first stage, of the model."""
    first = [n for chunk in range(layout.vpp) for n in layout.layers(layers, 0, chunk)]
    return {n >= dense for n in first}, {n >= dense for n in range(layers)}


def shrink_model(
    raw: Mapping[str, Any],
    shape: ModelShape,
    layers: Layers,
    full: Layouts,
    smaller: Layouts,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """The object of a ``config.json``.

    Args:
        raw: the model's own, of which ``shape`` are the facts.
        vocab_size: that of a tokenizer which is to be used; None: few, with as many rows of
            padding to a multiple of 64 as the model has.
    """
    heads, kv_heads = _heads(shape, full, smaller)
    out = {k: v for k, v in raw.items() if k not in DROPPED}
    out |= {
        "model_type": shape.family,
        "num_hidden_layers": layers.total,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": _width(smaller.train.tp, smaller.rollout.tp),
        "vocab_size": vocab_size or FEW_ROWS + shape.vocab_size % 64,
        "num_nextn_predict_layers": 0,
    }
    square = shape.mla is None and shape.hidden_size == shape.num_heads * shape.head_dim
    out["hidden_size"] = heads * HEAD_DIM * (1 if square else 2)
    if shape.mla is not None:
        out |= LATENT
        if shape.mla.q_lora_rank is not None:
            out["q_lora_rank"] = QUERY_RANK
    elif raw.get("head_dim") or not square:
        out["head_dim"] = HEAD_DIM
    if shape.moe is not None:
        out |= _experts(raw, shape.moe, layers, full, smaller)
    return out


def _heads(shape: ModelShape, full: Layouts, smaller: Layouts) -> tuple[int, int]:
    """Query heads and key-value heads: grouped, shared by all and copied by engines as they are."""
    tp, over = smaller.train.tp, smaller.rollout.attention_tp
    if shape.mla is not None:
        heads = math.lcm(2, tp, over)
        return heads, heads
    copied = full.rollout.attention_tp > shape.num_kv_heads
    several = shape.num_kv_heads > 1
    candidates = [n for n in range(tp, 8 * tp * over + 1, tp) if n % over == 0 or over % n == 0]
    kv_heads = max(candidates, key=lambda n: ((over > n) == copied, (n > 1) == several, -n))
    group = shape.num_heads // shape.num_kv_heads
    if group > 1:
        group = 2 if group % 2 == 0 else 3
    heads = math.lcm(kv_heads * group, over, tp)
    return heads, kv_heads


def _width(*parts: int) -> int:
    return WIDTH * math.lcm(*parts)


def _experts(
    raw: Mapping[str, Any], moe: MoEShape, layers: Layers, full: Layouts, smaller: Layouts
) -> dict[str, Any]:
    """A rank keeps several experts where it has several; groups stay groups."""
    groups = min(moe.num_groups, 2)
    per_token = min(moe.num_experts_per_token, 2)
    if moe.num_groups > 1:
        # as many of a token's experts in each of its groups: a group's score is the sum of them
        per_token = max(1, min(moe.num_experts_per_token // moe.topk_groups, 4))
    over = math.lcm(smaller.train.ep, smaller.rollout.ep, groups)
    most_ranks = max(full.train.ep, full.rollout.ep)
    several = 2 if moe.num_experts > most_ranks else 1
    num = over * several
    while num < max(2 * per_token, groups * 2) and num < moe.num_experts:
        num += over
    count_key = next(
        (k for k in ("n_routed_experts", "num_experts", "num_local_experts") if raw.get(k)),
        "num_experts",
    )
    train, rollout = smaller.train, smaller.rollout
    out: dict[str, Any] = {
        count_key: num,
        "num_experts_per_tok": min(per_token, num),
        "moe_intermediate_size": _width(train.tp, train.expert_tp, rollout.tp, rollout.expert_tp),
    }
    if "n_group" in raw:
        out |= {"n_group": groups, "topk_group": min(moe.topk_groups, 1)}
    if moe.num_shared_experts:
        out["n_shared_experts"] = min(moe.num_shared_experts, 2)
    if "first_k_dense_replace" in raw:
        out["first_k_dense_replace"] = layers.first_dense
    return out
