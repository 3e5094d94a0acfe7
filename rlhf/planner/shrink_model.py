"""A model of the same kind with few, narrow layers, as the ``config.json`` that says so. Pure.

What a key says of the structure stays: latent attention, shared experts, dense first layers, groups
of experts, tied embeddings, biases, norms, rotary scaling. Sizes become the smallest that the
smaller layouts divide; layers stay uneven over stages where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    dense = shape.moe.first_dense if shape.moe is not None else 0
    counts = _per_stage(full, shape.num_layers)
    mixed = 0 < dense < counts[0]
    pp, engine_stages = smaller.train.pp, smaller.rollout.pp
    if pp == 1:
        total = max(2, engine_stages)
        return Layers(total, None, None, 1, _first_dense(dense, shape.num_layers, total))
    vpp = 2 if full.vpp > 1 else 1
    ends = {0: full.first, pp - 1: full.last}
    middle = next((n for s, n in enumerate(counts) if not _is_end(s, full)), counts[0])
    wanted = [ends[s] if ends.get(s) is not None else middle for s in range(pp)]
    levels = sorted({n for n in wanted if n is not None})
    step = 0
    while True:
        few = [(levels.index(n) + 1 + step) * vpp for n in wanted if n is not None]
        if sum(few) >= engine_stages and (few[0] > 1 or not mixed):
            break
        step += 1
    return Layers(
        total=sum(few),
        first=few[0] if full.first is not None else None,
        last=few[-1] if full.last is not None else None,
        vpp=vpp,
        first_dense=_first_dense(dense, counts[0], few[0]),
    )


def _per_stage(layout: TrainLayout, layers: int) -> list[int]:
    return [
        sum(len(layout.layers(layers, stage, chunk)) for chunk in range(layout.vpp))
        for stage in range(layout.pp)
    ]


def _is_end(stage: int, layout: TrainLayout) -> bool:
    first = stage == 0 and layout.first is not None
    return first or (stage == layout.pp - 1 and layout.last is not None)


def _first_dense(dense: int, of: int, few: int) -> int:
    """Dense layers among the first ``few``, as there are ``dense`` at the start of ``of``."""
    return few if dense >= of else min(dense, few - 1, 1)


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
