"""Operations on layouts, pieces and Hugging Face folders."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

from rlhf.config.check import stage_faults
from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.reshard.schedule import rank_plan
from rlhf.reshard.topology import Topology
from rlhf.weights.block_scales import BLOCK, scale_shape, split_blocks
from rlhf.weights.families import (
    full_shapes,
    local_experts,
    pad_vocab,
    reshard_spread,
    rollout_pieces,
    train_pieces,
)
from rlhf.weights.hf_checkpoint import check_index, missing_files, missing_tensors, write_tensors
from rlhf.weights.piece import Piece
from tests.cases.case import Case, Op
from tests.helpers.shapes import make_shape

Rows = list[str]


def _rows_of_tensors(shards: list[Rows], pieces: list[list[Piece]], param: str) -> dict[str, Rows]:
    """Full tensors, row by row, out of the rows of each rank's ``param`` in the first layer."""
    rows: dict[str, dict[int, str]] = defaultdict(dict)
    for shard, held in zip(shards, pieces, strict=True):
        for piece in held:
            if piece.param == f"decoder.layers.0.{param}":
                name = piece.tensor.split(".")[-2].removesuffix("_proj")
                (start, stop), (at, _) = piece.region[0], piece.local[0]
                rows[name].update((start + i, shard[at + i]) for i in range(stop - start))
    return {name: [found[i] for i in sorted(found)] for name, found in rows.items()}


def qkv_unfuse(case: Case) -> Case:
    shape = make_shape(
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["head_dim"],
    )
    layout = TrainLayout(case["tp"], tp=case["tp"])
    pieces = [train_pieces(shape, layout, r) for r in range(layout.world)]
    return _rows_of_tensors(case["shards"], pieces, "self_attention.linear_qkv.weight")


def gate_up_unfuse(case: Case) -> Case:
    shape = make_shape(intermediate_size=case["intermediate"])
    layout = TrainLayout(case["tp"], tp=case["tp"])
    pieces = [train_pieces(shape, layout, r) for r in range(layout.world)]
    return _rows_of_tensors(case["shards"], pieces, "mlp.linear_fc1.weight")


def gate_up_reshard(case: Case) -> Case:
    """The plan's transfers, carried out on labelled rows of the trainer's ranks."""
    shape = make_shape(intermediate_size=case["intermediate"], num_hidden_layers=1)
    world = math.lcm(case["train_tp"], case["rollout_tp"])
    train = TrainLayout(world, tp=case["train_tp"])
    rollout = RolloutLayout(world, tp=case["rollout_tp"])
    source = [train_pieces(shape, train, r) for r in range(world)]
    held: list[dict[int, str]] = [{} for _ in range(world)]
    for rank, pieces in enumerate(source):
        for piece in (p for p in pieces if p.param.endswith("linear_fc1.weight")):
            (start, stop), (at, _) = piece.region[0], piece.local[0]
            kind = "g" if "gate_proj" in piece.tensor else "u"
            held[rank].update((at + i, f"{kind}{start + i}") for i in range(stop - start))
    mine = rank_plan(
        reshard_spread(shape, train, rollout),
        Topology.of(world, world),
        case["rollout_rank"],
        itemsize=4,
        area_bytes=2**20,
    )
    rows: dict[int, str] = {}
    for move in (placed.transfer for round_ in mine.rounds for placed in round_.arriving):
        if "gate_up_proj" in move.param:
            (start, stop), (at, _) = move.source_box[0], move.box[0]
            rows.update((at + i, held[move.source][start + i]) for i in range(stop - start))
    return {"rows": [rows[i] for i in sorted(rows)]}


def expert_global_id(case: Case) -> Case:
    shape = make_shape("qwen3_moe", num_experts=case["num_experts"])
    return {"global_id": local_experts(shape, case["ep"], case["ep_rank"])[case["local_id"]]}


def kv_head_by_rollout_rank(case: Case) -> Case:
    """A number where a rank holds one KV head, a list where it holds several."""
    shape = make_shape(num_key_value_heads=case["kv_heads"], head_dim=1, num_hidden_layers=1)
    layout = RolloutLayout(case["rollout_tp"], tp=case["rollout_tp"])
    by_rank: list[int | list[int]] = []
    for rank in range(layout.world):
        (heads,) = (
            list(range(*piece.region[0]))
            for piece in rollout_pieces(shape, layout, rank)
            if piece.tensor.endswith("k_proj.weight")
        )
        by_rank.append(heads if len(heads) > 1 else heads[0])
    return {"kv_heads_by_rank": by_rank}


def pp_layer_ids(case: Case) -> Case:
    layout = TrainLayout(
        case["pp"],
        pp=case["pp"],
        vpp=case["vpp"] or 1,
        first=case["first"],
        last=case["last"],
    )
    if faults := list(stage_faults(layout, case["num_layers"])):
        raise LayoutError(faults)
    ids = [
        [list(layout.layers(case["num_layers"], stage, v)) for v in range(layout.vpp)]
        for stage in range(layout.pp)
    ]
    return {"layer_ids": ids if case["vpp"] else [chunks[0] for chunks in ids]}


def vocab_pad(case: Case) -> Case:
    padded = pad_vocab(case["vocab"], case["divisible_by"], case["tp"])
    exported = full_shapes(make_shape(vocab_size=case["vocab"]))["lm_head.weight"]
    return {
        "padded": padded,
        "rows_per_rank": padded // case["tp"],
        "exported_rows": exported[0],
    }


def hf_export_keys(case: Case) -> Case:
    """What is written is what :func:`full_shapes` names, whatever the stages."""
    shape = make_shape(
        "qwen2",
        tie_word_embeddings=case["tie_word_embeddings"],
        num_hidden_layers=case["layers"],
    )
    layout = TrainLayout(case["pp"], pp=case["pp"])
    held = {p.tensor for r in range(layout.world) for p in train_pieces(shape, layout, r)}
    written = full_shapes(shape)
    assert held == set(written)
    required = [
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.self_attn.{x}_proj.bias" for n, x in ((0, "q"), (1, "v"))),
    ]
    return {
        "required": [name for name in required if name in written],
        "forbidden_or_equal": [n for n in ("lm_head.weight",) if n not in written],
    }


def hf_export_coverage(case: Case) -> Case:
    expected, written = case["expected_keys"], case["written_keys"]
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder) / "model.safetensors", {n: torch.zeros(1) for n in written})
        try:
            check_index(folder, dict.fromkeys(expected, (1,)))
            raises = False
        except ValueError:
            raises = True
    return {"missing": missing_tensors(expected, written), "raises": raises}


def hf_index_check(case: Case) -> Case:
    missing = missing_files(case["weight_map"], case["files"])
    return {"complete": not missing, "missing_files": missing}


def fp8_scale_shape(case: Case) -> Case:
    shape, tp, dim = (case["rows"], case["cols"]), case["tp"], case["split_dim"]
    assert case["block"] == BLOCK
    cuts = [shape[dim] * rank // tp for rank in range(tp + 1)]
    boxes = [
        tuple(span if d == dim else (0, size) for d, size in enumerate(shape))
        for span in pairwise(cuts)
    ]
    local = [scale_shape([stop - start for start, stop in box]) for box in boxes]
    return {
        "global_scale_shape": list(scale_shape(shape)),
        "shardable_without_requantising": not any(list(split_blocks(b, shape)) for b in boxes),
        "scales_if_local_ones_are_joined": sum(shape[dim] for shape in local),
    }


def mtp_name(case: Case) -> Case:
    shape = make_shape(
        "deepseek_v3",
        num_hidden_layers=case["num_layers"],
        num_nextn_predict_layers=case["mtp_index"] + 1,
    )
    part = f"{case['trainer_part']}.weight"
    (tensor,) = (
        piece.tensor
        for piece in train_pieces(shape, TrainLayout(1), 0, mtp=True)
        if piece.param == f"mtp.layers.{case['mtp_index']}.{part}"
    )
    return {"hf_prefix": tensor.removesuffix(f".{part}")}


OPS: dict[str, Op] = {
    "mtp_name": mtp_name,
    "fp8_scale_shape": fp8_scale_shape,
    "qkv_unfuse": qkv_unfuse,
    "gate_up_unfuse": gate_up_unfuse,
    "gate_up_reshard": gate_up_reshard,
    "expert_global_id": expert_global_id,
    "kv_head_by_rollout_rank": kv_head_by_rollout_rank,
    "pp_layer_ids": pp_layer_ids,
    "vocab_pad": vocab_pad,
    "hf_export_keys": hf_export_keys,
    "hf_export_coverage": hf_export_coverage,
    "hf_index_check": hf_index_check,
}
