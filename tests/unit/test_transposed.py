"""Matrices that lie transposed or interleaved: moving them through a plan is what torch does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub, LocalTransport
from rlhf.reshard.windows import Window
from rlhf.weights.families.operations import (
    BlockScales,
    Cols,
    ExpertStack,
    Frame,
    Group,
    Interleaved,
    Rows,
    Transposed,
)
from rlhf.weights.hf_checkpoint import load_pieces, write_tensors
from rlhf.weights.piece import Piece
from rlhf.weights.spread import At, Place, spread_of_shards
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shards import coded_tensors, cut
from tests.unit.test_families import check_tiling

GATE_UP = ("gate", "up")
FIRST = {  # of gate and up, cut by rows
    "stacked": (Rows(GATE_UP), lambda gate, up: torch.cat([gate, up])),
    "in turns": (Interleaved(GATE_UP), lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1)),
    "stacked, transposed": (
        Transposed(Rows(GATE_UP)),
        lambda gate, up: torch.cat([gate, up]).T,
    ),
    "in turns, transposed": (
        Transposed(Interleaved(GATE_UP)),
        lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1).T,
    ),
}
SECOND = {  # of down, cut by columns
    "plain": (Cols("down"), lambda down: down),
    "transposed": (Transposed(Cols("down")), lambda down: down.T),
    "back": (Transposed(Transposed(Cols("down"))), lambda down: down),
}
HIDDEN, FFN = 6, 16


def _frame(size=1, index=0, experts=()):
    shapes = {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    groups = {"tp": Group(size, index)}
    return Frame(shapes, groups, num_kv_heads=1, padded_vocab=0, experts=experts)


def _full():
    return coded_tensors(_frame().shapes, torch.float32)


def _shard(first, second, size, index):
    """Pieces of one rank, and what torch makes of the same cuts."""
    frame, full, pieces, wanted = _frame(size, index), _full(), [], {}
    start, stop = FFN // size * index, FFN // size * (index + 1)
    blocks = {"gate": full["gate"][start:stop], "up": full["up"][start:stop]}
    for param, (operation, by_torch), tensors in (
        ("w13", FIRST[first], (blocks["gate"], blocks["up"])),
        ("w2", SECOND[second], (full["down"][:, start:stop],)),
    ):
        laid = operation.lay(frame)
        wanted[param] = by_torch(*tensors).contiguous()
        assert laid.shape == tuple(wanted[param].shape)
        pieces += [
            Piece(p.tensor, p.region, param, p.local, transposed=p.transposed) for p in laid.parts
        ]
    return pieces, wanted


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_moving_through_a_plan_equals_torch(data):
    world = data.draw(st.sampled_from([1, 2, 4]))
    sides = []
    for _ in range(2):
        size = data.draw(st.sampled_from([n for n in (1, 2, 4) if n <= world]))
        forms = (
            data.draw(st.sampled_from(sorted(FIRST))),
            data.draw(st.sampled_from(sorted(SECOND))),
        )
        sides.append([_shard(*forms, size, rank % size) for rank in range(world)])
    source, destination = sides
    plans = rank_plans(
        spread_of_shards([p for p, _ in source], [p for p, _ in destination]),
        Topology.of(world, data.draw(st.sampled_from([1, 2]))),
        itemsize=4,
        area_bytes=data.draw(st.sampled_from([256, 1000, 1 << 16])),
    )
    hub = LocalHub(world)
    targets = [{n: torch.full_like(t, -1) for n, t in wanted.items()} for _, wanted in destination]
    movers = [
        Mover(plan, source[r][1], hub.transport(r), targets[r], dtype=torch.float32)
        for r, plan in enumerate(plans)
    ]
    in_threads([partial(mover.run, no_poll) for mover in movers])
    for got, (_, wanted) in zip(targets, destination, strict=True):
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("second", SECOND)
def test_pieces_tile_their_parameters_and_say_where_numbers_lie(first, second, tmp_path):
    """Also to those who cut and load by pieces."""
    full = _full()
    write_tensors(tmp_path / "model.safetensors", full)
    for index in range(2):
        pieces, wanted = _shard(first, second, 2, index)
        shapes = {name: tuple(t.shape) for name, t in wanted.items()}
        check_tiling(pieces, shapes)
        loaded = {name: torch.zeros(shape) for name, shape in shapes.items()}
        load_pieces(tmp_path, pieces, loaded)
        for name, tensor in cut(full, pieces, shapes).items():
            assert torch.equal(tensor, wanted[name])
            assert torch.equal(loaded[name], wanted[name])


def test_a_stack_of_transposed_experts_has_the_slot_in_front():
    (part, *_) = ExpertStack(Transposed(Cols("down"))).lay(_frame(2, 1, [0, 1])).parts
    assert part.transposed
    assert part.region == ((0, HIDDEN), (8, 16))
    assert part.local == ((0, 1), (0, 8), (0, HIDDEN))
    place = Place(part.region, "w2", part.local[1:], (0,), stacked=True, transposed=True)
    assert At(slot=5).box(place, ((2, 4), (9, 16))) == ((5, 6), (1, 8), (2, 4))


def test_scales_of_a_transposed_matrix_are_transposed():
    frame = Frame({"down": (256, 512)}, {"tp": Group(2, 1)}, num_kv_heads=1, padded_vocab=0)
    laid = BlockScales(Transposed(Cols("down"))).lay(frame)
    (part,) = laid.parts
    assert laid.shape == (2, 2)
    assert (part.region, part.local) == (((0, 2), (2, 4)), ((0, 2), (0, 2)))
    assert part.transposed


def test_an_engine_that_is_read_does_not_transpose():
    shards = [_shard("stacked", form, 1, 0)[0] for form in ("transposed", "plain")]
    spread = spread_of_shards([shards[0]], [shards[1]])
    (plan,) = rank_plans(
        spread, Topology.of(1, 1), itemsize=4, area_bytes=4096, local_area="outgoing"
    )
    window = Window(4096)
    with pytest.raises(RuntimeError, match="as they lie; down: rank 0 w2"):
        Mover(plan, window, LocalTransport(0, {}), {}, dtype=torch.float32)
    window.close()
