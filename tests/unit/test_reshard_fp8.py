"""Block fp8 on the way to an engine: what arrives is what the full tensors become, bit for bit."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.plan import plan
from rlhf.reshard.schedule import rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub
from rlhf.weights.block_scales import BLOCK
from rlhf.weights.families import (
    check_blocks,
    reshard_spread,
    rollout_param_shapes,
    rollout_pieces,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.piece import FLOAT8, Piece
from rlhf.weights.spread import Spread, spread_of_shards
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shapes import make_shape
from tests.helpers.shards import cut, dtypes_of, fp8_checkpoint, random_checkpoint, slices

NODE = 2
SIZES = {
    "vocab_size": 131,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
FAMILIES = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


def _layouts(world: int) -> list[tuple[TrainLayout, RolloutLayout]]:
    """Pairs of one world; not every model admits them."""
    trains = [
        {"tp": tp, "pp": pp, "ep": ep, "etp": etp}
        for tp, pp, (ep, etp) in product((1, 2), (1, 2), ((1, None), (2, 1), (4, 1)))
    ]
    rollouts = [
        {"tp": tp, "dp": dp, "ep": ep, "pp": pp}
        for tp, dp, ep, pp in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2))
    ]
    out = []
    for train, rollout in product(trains, rollouts):
        try:
            pair = (
                TrainLayout(world, **train),
                RolloutLayout(world, **rollout, quantization="block_fp8"),
            )
        except LayoutError:
            continue
        out.append(pair)
    return out


@st.composite
def movements(draw):
    """A shape of whole blocks, a training layout and an engine's; either from tables or pieces."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    widths = st.sampled_from([128, 256, 384])
    shape = make_shape(
        family,
        **{**SIZES, **FAMILIES[family]},
        hidden_size=draw(widths),
        intermediate_size=draw(st.sampled_from([256, 512])),
        **({"moe_intermediate_size": draw(widths)} if family != "qwen3" else {}),
    )
    fitting = []
    for train, rollout in _layouts(draw(st.sampled_from([1, 2, 4]))):
        try:
            check_blocks(shape, train, rollout)
            reshard_spread(shape, train, rollout)
        except LayoutError:
            continue
        fitting.append((train, rollout))
    train, rollout = draw(st.sampled_from(fitting))
    return shape, train, rollout


def _move(shape, train, rollout, spread, area_bytes, spoil=lambda rank, held: None):
    """Engine shards of all ranks, filled by movers."""
    world, full = train.world, random_checkpoint(shape)
    plans = rank_plans(spread, Topology.of(world, NODE), itemsize=4, area_bytes=area_bytes)
    hub, targets, movers = LocalHub(world), [], []
    for rank, mine in enumerate(plans):
        held = cut(full, train_pieces(shape, train, rank), train_param_shapes(shape, train, rank))
        spoil(rank, held)
        dtypes = dtypes_of(rollout_pieces(shape, rollout, rank), torch.float32)
        sizes = rollout_param_shapes(shape, rollout, rank)
        targets.append(
            {n: torch.zeros(tuple(s), dtype=dtypes.get(n, torch.float32)) for n, s in sizes.items()}
        )
        transport = hub.transport(rank)
        movers.append(Mover(mine, held, transport, targets[rank], dtype=torch.float32))
    in_threads([partial(mover.run, no_poll) for mover in movers])
    return targets, plans


def _spread_of_pieces(shape, train, rollout) -> Spread:
    ranks = range(train.world)
    return spread_of_shards(
        [[*train_pieces(shape, train, rank)] for rank in ranks],
        [[*rollout_pieces(shape, rollout, rank)] for rank in ranks],
    )


def _bits(values):
    return values.contiguous().view(torch.uint8)


def _check(shape, rollout, targets):
    wanted = fp8_checkpoint(shape)
    for rank, params in enumerate(targets):
        for piece in rollout_pieces(shape, rollout, rank):
            got = params[piece.param][slices(piece.local)]
            part = wanted[piece.tensor][slices(piece.region)].reshape(got.shape)
            assert got.dtype == part.dtype, piece
            assert torch.equal(_bits(got), _bits(part)), piece


@settings(max_examples=15, deadline=None)
@given(movements(), st.booleans(), st.sampled_from([1 << 16, 1 << 17, 1 << 24]))
def test_engines_get_what_the_full_tensors_become(movement, from_pieces, area_bytes):
    shape, train, rollout = movement
    spread = (
        _spread_of_pieces(shape, train, rollout)
        if from_pieces
        else (reshard_spread(shape, train, rollout))
    )
    targets, _ = _move(shape, train, rollout, spread, area_bytes)
    _check(shape, rollout, targets)


def test_what_a_node_passes_on_is_fp8_already():
    """Four engines of one rank, two stages over two nodes: every stage's layers are relayed
    inside the other node, and copied by the ranks that hold them.
    """
    shape = make_shape("qwen3", **SIZES, hidden_size=256, intermediate_size=512)
    train = TrainLayout(4, pp=2)
    rollout = RolloutLayout(4, quantization="block_fp8")
    spread = reshard_spread(shape, train, rollout)
    targets, plans = _move(shape, train, rollout, spread, 1 << 17)
    parts = [(p, m) for mine in plans for r in mine.rounds for m in r.outgoing for p in m.parts]
    relayed = [p.transfer for p, _ in parts if p.relayed_from is not None]
    local = [p.transfer for mine in plans for r in mine.rounds for p in r.local]
    assert any(t.dtype == FLOAT8 for t in relayed) and all(t.form == "plain" for t in relayed)
    assert any(t.form == "weight" for t in local) and any(t.form == "scale" for t in local)
    _check(shape, rollout, targets)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_matrix_that_is_too_large_for_a_round_is_cut_between_blocks(dim):
    """Along rows first, then along columns: a row of blocks may be larger than an area."""
    sizes = [BLOCK, BLOCK]
    sizes[dim] = 5 * BLOCK + 64
    region = tuple((0, n) for n in sizes)
    held = [Piece("x.weight", region, "w", region)]
    needed = [Piece("x.weight", region, "w", region, FLOAT8)]
    spread = spread_of_shards([held, []], [[], needed])
    limit = 300 * BLOCK  # two blocks and a part of a third
    made = plan(spread, Topology.of(2, 2), 2, 4 * limit)
    cuts = [atom.region[dim] for s in made.sendings for atom in s.bundle.atoms]
    assert sorted(cuts) == [(0, 256), (256, 512), (512, 704)]


def test_what_is_not_finite_is_named():
    shape = make_shape("qwen3", **SIZES, hidden_size=128, intermediate_size=256)
    train, rollout = TrainLayout(2, pp=2), RolloutLayout(2, quantization="block_fp8")

    def spoil(rank, held):
        if rank == 1:
            held["decoder.layers.0.mlp.linear_fc2.weight"][5, 7] = float("nan")

    spread = reshard_spread(shape, train, rollout)
    with pytest.raises(RuntimeError, match=r"finite.*layers\.1\.mlp\.down_proj\.weight") as caught:
        _move(shape, train, rollout, spread, 1 << 20, spoil)
    assert "gate_proj" not in str(caught.value) and "rank 1" in str(caught.value)
