"""Memory by region, rank and phase: conservation, closed forms, and what follows from a change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.config.schema import MemorySection, ModelSection, RolloutSection, TrainSection
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.dist.layout_text import parse_rollout, parse_train
from rlhf.memory.table import (
    ALWAYS,
    NEEDED,
    RESTORE,
    Region,
    Span,
    peak_of,
    residency,
    steps_through,
)
from rlhf.memory.ways import Choices, Way, choose_way
from rlhf.planner.buffers import TrainParam, lay_out
from rlhf.planner.engine_memory import derived_bytes, engine_weight_bytes, kv_token_bytes
from rlhf.planner.fit import misfits, smallest_change
from rlhf.planner.memory import Job, Machine, ledger
from rlhf.planner.train_memory import EXPERT_PARAM, ModelUse, disk_bytes, train_bytes
from rlhf.weights.families import (
    full_shapes,
    rollout_param_shapes,
    train_param_shapes,
    train_pieces,
)
from rlhf.weights.find_model import find_model
from rlhf.weights.piece import FLOAT32
from tests.helpers.recipes import RECIPES
from tests.helpers.shapes import make_shape, rollout_layouts, shapes, train_layouts

SERVING = {Region.ENGINE, Region.DERIVED, Region.KV_CACHE}
OF_ROLES = {
    Region.ACTOR,
    Region.OPTIMIZER,
    Region.REFERENCE,
    Region.CRITIC,
    Region.CRITIC_OPTIMIZER,
    Region.REWARD_MODEL,
}
ROLES = ("reference", "critic", "reward_model")
MACHINE = Machine(80 * 10**9, 2000 * 10**9, 8, 8 * 10**9)


def _job(model: str, ranks: int, train: str, rollout: str, **changes) -> Job:
    layout = parse_train(train, ranks)
    job = Job(
        shape=find_model(model),
        train_layout=layout,
        rollout_layout=parse_rollout(rollout, ranks),
        model=ModelSection(path=model),
        train=TrainSection(recompute="full", sequence_parallel=layout.tp > 1),
        rollout=RolloutSection(),
        memory=MemorySection(),
        window_bytes=2**29,
        longest_tokens=4096,
    )
    return replace(job, **changes)


def _qwen(**changes) -> Job:
    return _job("qwen2.5-7b", 8, "tp=4", "tp=2", **changes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_replicas_share_the_optimizer_state_and_padding_has_none(data):
    shape = data.draw(shapes())
    layout = data.draw(train_layouts(shape))
    got = train_bytes(ModelUse(shape, 2), layout)
    trained = 0.0
    for rank in range(layout.world):
        biases = {p.param for p in train_pieces(shape, layout, rank) if p.dtype == FLOAT32}
        for name, size in train_param_shapes(shape, layout, rank).items():
            spread = EXPERT_PARAM in name and layout.ep > 1
            replicas = layout.edp if spread else layout.dp * layout.cp
            trained += 0 if name in biases else math.prod(size) / replicas
    assert sum(got.optimizer) == round(12 * trained)
    assert sum(train_bytes(ModelUse(shape, 4), layout).optimizer) == round(8 * trained)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranks_of_a_stage_hold_parameters_of_the_same_shapes(data):
    shape = data.draw(shapes())
    layout = data.draw(train_layouts(shape))
    got = train_bytes(ModelUse(shape, 2, trainable=False), layout)
    for rank in range(layout.world):
        sizes = train_param_shapes(shape, layout, rank)
        biases = {p.param for p in train_pieces(shape, layout, rank) if p.dtype == FLOAT32}
        wanted = sum(math.prod(n) * (4 if name in biases else 2) for name, n in sizes.items())
        assert got.weights[rank] == wanted
    assert not any(got.gradients) and not any(got.optimizer)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 900)),
)
def test_shards_of_a_buffer_are_equal_and_hold_each_element_once(sizes, replicas, bucket):
    params = [TrainParam(size, is_expert=False, alone=alone) for size, alone in sizes]
    buffer = lay_out(params, replicas, bucket)
    elements = sum(size for size, _ in sizes)
    assert sum(buffer.owned()) == elements
    for replica, owned in enumerate(buffer.owned()):
        begins = [(b, replica * (b.length // replicas)) for b in buffer.buckets]
        inside = [range(at, at + b.length // replicas) for b, at in begins]
        assert owned == sum(
            len(range(max(r.start, start), min(r.stop, stop)))
            for b, r in zip(buffer.buckets, inside, strict=True)
            for start, stop in b.spans
        )
    for found in buffer.buckets:
        assert found.length % replicas == found.length % 128 == 0
        assert all(start % 64 == 0 for start, _ in found.spans)
        assert found.spans[-1][1] <= found.length < found.spans[-1][1] + 128 * replicas + 64
        if bucket is not None:
            assert all(stop < bucket for _, stop in found.spans[:-1])
    assert sum(len(found.spans) for found in buffer.buckets) == len(sizes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_engine_holds_its_parameters(data):
    shape = data.draw(shapes())
    layout = data.draw(rollout_layouts(shape))
    got = engine_weight_bytes(shape, layout, 4)
    for rank in range(layout.world):
        sizes = rollout_param_shapes(shape, layout, rank).values()
        assert got[rank] == 4 * sum(map(math.prod, sizes))


def test_what_an_engine_derives_is_its_part_of_the_up_projection():
    shape = make_shape("deepseek_v3")
    layout = RolloutLayout(8, tp=8, dp=2, ep=4)
    up = rollout_param_shapes(shape, layout, 3)["model.layers.0.self_attn.kv_b_proj.weight"]
    assert derived_bytes(shape, layout, 2)[3] == 2 * math.prod(up) * shape.num_layers
    assert derived_bytes(make_shape("llama"), RolloutLayout(1), 2) == (0,)


@pytest.mark.parametrize(
    ("model", "rollout", "ranks", "token"),
    [
        ("qwen2.5-7b", "tp=1", 1, 28 * 2 * 4 * 128 * 2),
        ("qwen2.5-7b", "tp=4", 4, 28 * 2 * 1 * 128 * 2),
        ("qwen3-30b-a3b", "tp=8", 8, 48 * 2 * 1 * 128 * 2),  # 4 KV heads: two ranks have each
        ("qwen3-30b-a3b", "tp=8,dp=4", 8, 48 * 2 * 2 * 128 * 2),
        ("qwen2.5-7b", "pp=2", 2, 14 * 2 * 4 * 128 * 2),
        ("deepseek-v3-671b", "tp=64,dp=8,ep=64", 64, 61 * 576 * 2),
    ],
)
def test_a_token_of_the_kv_cache_is_known_by_heart(model, rollout, ranks, token):
    shape = find_model(model)
    assert set(kv_token_bytes(shape, parse_rollout(rollout, ranks), 2)) == {token}


def test_checkpoints_hold_each_tensor_once():
    shape = make_shape("deepseek_v3")
    elements = sum(map(math.prod, full_shapes(shape).values()))
    biases = 12 * sum(shape.has_experts(n) for n in range(shape.num_layers))
    disk = disk_bytes(shape, 2)
    assert disk.export == 2 * elements + 2 * biases
    assert disk.state == disk.export + 12 * elements


@pytest.mark.parametrize("time_slice", ["engine", "all"])
@pytest.mark.parametrize("optimizer", ["device", "host"])
@pytest.mark.parametrize("roles", [(), ROLES, ("critic",)])
@pytest.mark.parametrize("from_engine", [False, True])
def test_a_phase_has_what_it_needs_and_nothing_of_absent_roles(
    time_slice, optimizer, roles, from_engine
):
    memory = MemorySection(time_slice=time_slice, optimizer=optimizer)
    table = residency(memory, roles, from_engine=from_engine)
    for span, held in table.held.items():
        assert held >= table.needed[span]
        of_states = {Region.OPTIMIZER} if span.phase == "SAVE" and optimizer == "host" else set()
        missing = NEEDED[span] - held - of_states
        assert not missing or (missing == {Region.CRITIC} and "critic" not in roles)
        assert held >= ALWAYS
        assert span.role in ("", "actor", *roles)
        for role, region in (("reference", Region.REFERENCE), ("critic", Region.CRITIC_OPTIMIZER)):
            assert role in roles or region not in held
    assert (RESTORE in table.held) == (time_slice == "all" and from_engine)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_without_slicing_roles_stay_and_engines_are_away_while_models_work(num_updates):
    table = residency(MemorySection(), ROLES, num_updates=num_updates)
    for span, held in table.held.items():
        trains = span.phase in ("SCORE", "UPDATE")
        assert (held >= SERVING) != trains
        assert not (held & SERVING and trains)
        assert held >= OF_ROLES
        between = span == Span("UPDATE", "critic") and num_updates > 1
        assert (Region.GRADIENTS in held) == (span == Span("UPDATE", "actor") or between)
        assert (Region.CRITIC_GRADIENTS in held) == (span.phase == "UPDATE")


def test_slicing_keeps_less_in_every_phase():
    kept, sliced = (
        residency(MemorySection(time_slice=name), ROLES).held for name in ("engine", "all")
    )
    for span, held in kept.items():
        assert sliced[span] <= held
    assert Region.ACTOR not in sliced[Span("ROLLOUT")]
    assert Region.KV_CACHE not in sliced[Span("RESHARD")]
    assert Region.CRITIC_GRADIENTS not in sliced[Span("UPDATE", "actor")]


def test_a_state_on_the_host_leaves_the_device_and_is_whole_there():
    at_device = ledger(_qwen(), MACHINE)
    on_host = ledger(_qwen(memory=MemorySection(optimizer="host")), MACHINE)
    assert at_device.host == (0,)
    assert on_host.host == (sum(at_device.regions[Region.OPTIMIZER]),)
    assert max(on_host.regions[Region.OPTIMIZER]) <= 2 * 2**29


def test_ppo_has_a_second_model_with_one_row_for_a_head():
    shape = find_model("qwen2.5-7b")
    found = ledger(_qwen(critic=shape, reference=True, reward_model=shape), MACHINE).regions
    head = shape.hidden_size * 2 * (152064 // 4 - 1)
    assert found[Region.REFERENCE][0] - found[Region.REWARD_MODEL][0] == head
    assert found[Region.CRITIC][0] == pytest.approx(found[Region.REWARD_MODEL][0], rel=1e-6)
    assert found[Region.CRITIC_GRADIENTS][0] == 2 * found[Region.CRITIC][0]


@pytest.mark.parametrize("name", RECIPES)
def test_shards_of_known_recipes_are_those_of_the_weight_tables(name):
    known = RECIPES[name]
    found = ledger(_job(known.model, known.ranks, known.train, known.rollout), MACHINE).regions
    for region, wanted in (
        (Region.ACTOR, known.train_shard_gb),
        (Region.ENGINE, known.engine_shard_gb),
    ):
        # with padding, and routers in float32
        assert sum(found[region]) / known.ranks / 1e9 == pytest.approx(wanted, rel=0.006)


def test_what_does_not_fit_is_named_with_its_largest_regions():
    job, small = _qwen(), replace(MACHINE, gpu_bytes=24 * 10**9)
    found = misfits(job, ledger(job, small), small)
    update = next(m for m in found if m.what == "UPDATE(actor) on rank 0")
    assert update.have == 24 * 10**9 < update.need
    assert update.regions[0][0] is Region.OPTIMIZER
    assert "more than the 24 there are: optimizer" in str(update)


@pytest.mark.parametrize(
    ("changes", "machine", "words"),
    [
        ({"rollout": RolloutSection(mem_fraction=0.85)}, {}, "rollout.mem_fraction=0.65"),
        ({"rollout": RolloutSection(mem_fraction=0.05)}, {}, "rollout.mem_fraction=0.15"),
        (
            {"train": TrainSection(tokens_per_microbatch=65536)},
            {},
            "train.tokens_per_microbatch=16384",
        ),
        (
            {},
            {"gpu_bytes": 32 * 10**9},
            "memory.time_slice=all and memory.optimizer=host",
        ),
        ({}, {"gpu_bytes": 4 * 10**9, "other_bytes": 10**9}, None),
    ],
)
def test_the_smallest_change_makes_it_fit(changes, machine, words):
    job, here = replace(_qwen(), **changes), replace(MACHINE, **machine)
    assert misfits(job, ledger(job, here), here)
    change = smallest_change(job, here)
    assert (change and change.words) == words


def test_a_host_too_small_is_a_misfit_of_its_own():
    job = _qwen(memory=MemorySection(optimizer="host"))
    here = replace(MACHINE, host_bytes=10 * 10**9)
    found = misfits(job, ledger(job, here), here)
    assert [m.what for m in found] == ["host of node 0"]


def test_a_larger_world_needs_no_more_on_any_rank():
    small, large = (ledger(_job("qwen2.5-7b", ranks, "tp=4", "tp=2"), MACHINE) for ranks in (8, 32))
    for region, sizes in small.regions.items():
        # a bucket is a multiple of the ranks that share it
        assert max(large.regions[region]) <= max(sizes) + 4 * 4096
    assert TrainLayout(32, tp=4).dp == 8


def _sliced(**changes) -> Job:
    return _qwen(memory=MemorySection(time_slice="all"), reference=True, **changes)


def test_weights_come_back_from_engines_masters_or_a_copy():
    shape = find_model("qwen2.5-7b")
    found = ledger(_sliced(critic=shape), MACHINE)
    assert found.ways == {
        Region.ACTOR: Way.ENGINE,
        Region.CRITIC: Way.MASTERS,
        Region.REFERENCE: Way.COPY,
    }
    assert RESTORE in found.phases
    assert Region.ACTOR in found.phases[Span("SCORE", "reference")], "nothing would bring it back"
    fp8 = ledger(replace(_sliced(), rollout=RolloutSection(quantization="block_fp8")), MACHINE)
    assert fp8.ways[Region.ACTOR] is Way.MASTERS, "engines have it rounded"
    assert RESTORE not in fp8.phases
    assert ledger(_qwen(), MACHINE).ways == {}


def test_the_host_has_a_copy_of_what_nothing_else_brings_back():
    shape = find_model("qwen2.5-7b")
    found = ledger(_sliced(critic=shape, reward_model=shape), MACHINE)
    assert found.host == (
        sum(found.regions[Region.REFERENCE]) + sum(found.regions[Region.REWARD_MODEL]),
    )
    job = replace(_sliced(critic=shape), model=ModelSection(path="qwen2.5-7b", dtype="float32"))
    found = ledger(job, MACHINE)
    assert found.ways[Region.CRITIC] is Way.COPY, "a float32 model's weights are its masters"
    assert found.host == (sum(found.regions[Region.REFERENCE]) + sum(found.regions[Region.CRITIC]),)


def test_without_room_to_stay_the_actor_comes_back_from_its_masters():
    """Then a phase of another role does without it."""
    job = _sliced(critic=find_model("qwen2.5-7b"))
    staying = ledger(job, MACHINE)
    most = max(staying.phase_bytes(Span("UPDATE", "critic")))
    found = ledger(job, replace(MACHINE, gpu_bytes=most - 1))
    assert found.ways[Region.ACTOR] is Way.MASTERS
    assert RESTORE not in found.phases
    less = max(found.phase_bytes(Span("UPDATE", "critic")))
    assert most - less == max(found.regions[Region.ACTOR])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("is_float32", [True, False])
@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("can_stay", [True, False])
def test_a_way_back_is_never_one_that_does_not_exist(trained, is_float32, served, can_stay):
    way = choose_way(Choices(trained, is_float32, served, can_stay))
    assert way is not Way.ENGINE or (served and can_stay)
    assert way is not Way.MASTERS or (trained and not is_float32)
    assert (way is Way.COPY) == (not (served and can_stay) and (is_float32 or not trained))


STEP = [
    Span("RESHARD"),
    Span("ROLLOUT"),
    Span("SCORE", "actor"),
    Span("SCORE", "reference"),
    Span("UPDATE", "actor"),
    Span("RESHARD"),
    Span("SAVE"),
    Span("EVAL"),
    Span("ROLLOUT"),
]


@pytest.mark.parametrize("time_slice", ["engine", "all"])
def test_edges_never_have_more_than_the_fullest_phase(time_slice):
    """Releases come first, so the way between two phases is no higher than the two."""
    found = ledger(_qwen(memory=MemorySection(time_slice=time_slice), reference=True), MACHINE)
    sizes = {region: parts[0] for region, parts in found.regions.items()}
    steps = steps_through(found.table, STEP, sizes)
    most = max(found.phase_bytes(span)[0] for span in found.phases)
    assert peak_of(steps, math.inf).size == most
    assert peak_of(steps, most).fits
    assert not peak_of(steps, most - 1).fits
    assert sum(size for name, size in steps if "RESTORE" in name) == (
        sizes[Region.ACTOR] - sizes[Region.KV_CACHE] if time_slice == "all" else 0
    )
