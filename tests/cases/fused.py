"""Operations on what an engine fuses, and on the buckets that bring it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch

from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import Transfer, rank_plan, rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalTransport
from rlhf.reshard.windows import Window
from rlhf.weights.families.operations import (
    Cols,
    Frame,
    Group,
    Interleaved,
    Laid,
    Rows,
    Transposed,
)
from rlhf.weights.piece import Piece
from rlhf.weights.spread import spread_of_shards
from tests.cases.case import Case, Op


def bucket_plan(case: Case) -> Case:
    """Rounds are the buckets, and one loader call of the engine takes them all."""
    sizes, limit = dict(case["tensors"]), case["bucket_bytes"]
    groups = [*case["must_share_a_bucket"]]
    groups += [[name] for name in sizes if not any(name in group for group in groups)]
    held = [Piece(name, ((0, size),), name, ((0, size),)) for name, size in sizes.items()]
    needed = [
        Piece(name, ((0, sizes[name]),), "+".join(group), ((end - sizes[name], end),))
        for group in groups
        for name, end in zip(group, accumulate(sizes[n] for n in group), strict=True)
    ]
    plans = rank_plans(
        spread_of_shards([held, []], [[], needed]),
        Topology.of(2, 2),
        itemsize=1,
        area_bytes=limit,
    )
    window = Window(plans[1].incoming_area_bytes)
    mover = Mover(plans[1], {}, LocalTransport(1, {}), window, dtype=torch.uint8)
    call: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for param, (span,), _ in (w for writes in mover.receiver_rounds()["writes"] for w in writes):
        call[param].append(span)
    window.close()
    whole = {"+".join(group): sum(sizes[name] for name in group) for group in groups}
    largest = max(max(p.incoming_area_bytes, p.outgoing_area_bytes) for p in plans)
    return {
        "every_group_in_one_call": call.keys() == whole.keys(),
        "every_tensor_once": all(_tiles(call[param], size) for param, size in whole.items()),
        "max_bucket_bytes": max(limit, largest),
    }


def _tiles(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether each of [0, size) is in one span."""
    ends = sorted(spans)
    gaps = any(stop != start for (_, stop), (start, _) in pairwise(ends))
    return not gaps and ends[0][0] == 0 and ends[-1][1] == size


def fused_expert_layout(case: Case) -> Case:
    """The rows and columns that a plan puts into an expert of interleaved gate and up."""
    size, hidden = case["intermediate"], case["hidden"]
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    assert case["down_shape_trainer"] == list(shapes["down"])
    frame = Frame(shapes, {"tp": Group(1, 0)}, num_kv_heads=1, padded_vocab=0)
    trainer = {"w13": Rows(("gate", "up")).lay(frame), "w2": Cols("down").lay(frame)}
    engine = {
        "w13": Interleaved(("gate", "up")).lay(frame),
        "w2": Transposed(Cols("down")).lay(frame),
    }
    rows: dict[int, str] = {}
    names = [*case["gate_rows"], *case["up_rows"]]
    transfers = _transfers(trainer, engine)
    for move in transfers:
        (start, stop), (at, _) = move.source_box[0], move.box[0]
        if move.param == "w13":
            rows.update((at + i, names[start + i]) for i in range(stop - start))
    boxes = [move.box for move in transfers if move.param == "w2" and move.transposed]
    return {
        "gate_up_order": [rows[i] for i in sorted(rows)],
        "down_shape_engine": [max(box[dim][1] for box in boxes) for dim in range(2)],
    }


def _transfers(source: Mapping[str, Laid], destination: Mapping[str, Laid]) -> list[Transfer]:
    """What one rank moves between two forms of its parameters."""
    shards = [
        [
            Piece(part.tensor, part.region, param, part.local, transposed=part.transposed)
            for param, laid in side.items()
            for part in laid.parts
        ]
        for side in (source, destination)
    ]
    spread = spread_of_shards(shards[:1], shards[1:])
    mine = rank_plan(spread, Topology.of(1, 1), 0, itemsize=4, area_bytes=2**20)
    return [placed.transfer for round_ in mine.rounds for placed in round_.arriving]


OPS: dict[str, Op] = {"bucket_plan": bucket_plan, "fused_expert_layout": fused_expert_layout}
