"""How one rank of each program cuts tensors. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.weights.families.checks import engine_vocab, padded_vocab
from rlhf.weights.families.family import Dims
from rlhf.weights.families.operations import Frame, Group, GroupName, Shape
from rlhf.weights.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Grid:
    """How one rank of a program cuts tensors."""

    groups: Mapping[GroupName, Group]
    experts: Sequence[int]  # global numbers of the rank's
    vocab_rows: int  # padding included


def train_grid(shape: ModelShape, layout: TrainLayout, rank: int) -> Grid:
    """Megatron's cuts on ``rank``."""
    at = layout.coord(rank)
    return Grid(
        groups={"tp": Group(layout.tp, at.tp), "expert": Group(layout.expert_tp, at.etp)},
        experts=local_experts(shape, layout.ep, at.ep),
        vocab_rows=padded_vocab(shape, layout.tp),
    )


def rollout_grid(shape: ModelShape, layout: RolloutLayout, rank: int) -> Grid:
    """The engine's cuts on ``rank``."""
    at = layout.coord(rank)
    everywhere, tp = Group(1, 0), Group(layout.tp, at.tp)
    groups: dict[GroupName, Group] = {
        "tp": tp,
        "attention": Group(layout.attention_tp, at.tp % layout.attention_tp),
        "dense": everywhere if layout.dp > 1 else tp,
        "shared": everywhere if layout.a2a == "deepep" else tp,
        "expert": Group(layout.expert_tp, at.tp % layout.expert_tp),
    }
    return Grid(
        groups=groups,
        experts=engine_experts(shape, layout, at.tp // layout.expert_tp),
        vocab_rows=engine_vocab(shape),
    )


def local_experts(shape: ModelShape, ep: int, ep_rank: int) -> range:
    """Global numbers of the experts on one rank of an expert-parallel group; none: empty."""
    share = shape.moe.num_experts // ep if shape.moe is not None else 0
    return range(ep_rank * share, (ep_rank + 1) * share)


def engine_experts(shape: ModelShape, layout: RolloutLayout, ep_rank: int) -> Sequence[int]:
    """The model's number of each expert of an engine's ep group, copies included."""
    if shape.moe is None or layout.redundant_experts == 0:
        return local_experts(shape, layout.ep, ep_rank)
    share = (shape.moe.num_experts + layout.redundant_experts) // layout.ep
    slots = range(ep_rank * share, (ep_rank + 1) * share)
    return [slot % shape.moe.num_experts for slot in slots]


def frame_of(shape: ModelShape, grid: Grid, tensors: Mapping[str, Dims]) -> Frame:
    """What operations on these tensors need to know."""
    return Frame(
        shapes_of(shape, tensors), grid.groups, shape.num_kv_heads, grid.vocab_rows, grid.experts
    )


def shapes_of(shape: ModelShape, tensors: Mapping[str, Dims]) -> dict[str, Shape]:
    """Sizes of tensors, out of the names of their dims."""
    sizes = {
        "hidden": shape.hidden_size,
        "embedding_and_hidden": 2 * shape.hidden_size,
        "ffn": shape.ffn_size,
        "query": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "head": shape.head_dim,
        "vocab": shape.vocab_size,
    }
    if (mla := shape.mla) is not None:
        sizes |= {
            "q_lora": mla.q_lora_rank or 0,
            "kv_lora": mla.kv_lora_rank,
            "kv_lora_and_rope": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "key_and_value": shape.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "value": shape.num_heads * mla.v_head_dim,
        }
    if (moe := shape.moe) is not None:
        sizes |= {
            "experts": moe.num_experts,
            "expert_ffn": moe.ffn_size,
            "shared_ffn": moe.num_shared_experts * moe.ffn_size,
        }
    return {name: tuple(sizes[dim] for dim in dims) for name, dims in tensors.items()}
