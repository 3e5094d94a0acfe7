"""Laws of the time model: closed forms, conservation, and what a change must not do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config.schema import MemorySection, ModelSection, RolloutSection, TrainSection
from rlhf.dist.layout_text import parse_rollout, parse_train
from rlhf.memory.table import Span
from rlhf.planner.arithmetic import layer_work, num_params
from rlhf.planner.links import Group, exchange_s, gather_s, reduce_s, send_s
from rlhf.planner.load import Load
from rlhf.planner.memory import Job, Machine
from rlhf.planner.rollout_time import rollout_time, step_cost
from rlhf.planner.speeds import H100, Speeds
from rlhf.planner.step_time import served, step_seconds, step_times, trained
from rlhf.planner.train_time import num_microbatches, scoring_time, stages, update_time
from rlhf.weights.families import full_shapes
from rlhf.weights.find_model import find_model, known_models

MACHINE = Machine(80 * 10**9, 2000 * 10**9, 8, 8 * 10**9)
LOAD = Load(64, 8, 512, 1024, 4096, 16384, 256)
IDEAL = {name: 0.0 for name in Speeds.model_fields if name.endswith("_s")}
"""No time but that of bytes and products."""
BARE = H100.model_copy(update=IDEAL)
FASTER = [n for n in Speeds.model_fields if n.endswith(("_gbs", "_tflops"))]
SHARES = ["train_matmul", "expert_matmul", "attention", "prefill_matmul", "decode_bandwidth"]


def job(model: str, ranks: int, train: str, rollout: str, **section) -> Job:
    layout = parse_train(train, ranks)
    return Job(
        shape=find_model(model),
        train_layout=layout,
        rollout_layout=parse_rollout(rollout, ranks),
        model=ModelSection(path=model, fp32_head=False),
        train=TrainSection(**{"recompute": "none", "sequence_parallel": layout.tp > 1, **section}),
        rollout=RolloutSection(),
        memory=MemorySection(),
        window_bytes=2**29,
        longest_tokens=4096,
    )


DENSE = job("llama-3.1-8b", 8, "tp=1", "tp=1")
MOE = job("qwen3-30b-a3b", 16, "tp=2,pp=2,ep=8,etp=1", "tp=8,ep=8")
MLA = job("deepseek-v3-671b", 128, "tp=8,pp=4,last=13,cp=4,ep=32,etp=1", "tp=64,dp=8,ep=64")


@pytest.mark.parametrize("name", known_models())
def test_parameters_are_those_of_the_tables_without_norms_and_biases(name):
    shape = find_model(name)
    matrices = sum(math.prod(size) for size in full_shapes(shape).values() if len(size) > 1)
    assert num_params(shape) == matrices


def test_a_training_pass_on_one_rank_is_six_flops_per_parameter_and_token():
    held = trained(DENSE, MACHINE, DENSE.shape, head=True)
    took = update_time(held, LOAD, BARE).parts
    layers = sum(layer_work(DENSE.shape, n).params for n in range(DENSE.shape.num_layers))
    head = DENSE.shape.vocab_size * DENSE.shape.hidden_size
    tokens, answers = LOAD.tokens / 8, LOAD.answers * LOAD.answer_tokens / 8
    seen = tokens * LOAD.seen_tokens / 2 * layer_work(DENSE.shape, 0).context_flops * 32
    products = (6 * tokens * layers + 8 * answers * head) / (989e12 * H100.train_matmul)
    assert took["compute"] == pytest.approx(products + 3 * seen / (989e12 * H100.attention))
    assert took["communication"] == took["bubble"] == took["recompute"] == 0


def test_full_recomputation_adds_a_forward_pass_of_the_layers():
    plain, full = (
        replace(DENSE, train=TrainSection(recompute=recompute)) for recompute in ("none", "full")
    )
    both = [
        update_time(trained(j, MACHINE, j.shape, head=False), LOAD, BARE).parts
        for j in (plain, full)
    ]
    assert both[1]["recompute"] == pytest.approx(both[0]["compute"] / 3)
    assert both[1]["compute"] == both[0]["compute"]


@pytest.mark.parametrize(("layout", "chunks"), [("pp=4", 1), ("pp=4,vpp=2", 2), ("pp=8", 1)])
def test_the_bubble_is_that_of_a_pipeline(layout, chunks):
    """(pp - 1) / vpp micro-batches, where stages are alike."""
    piped = job("llama-3.1-8b", 8, layout, "tp=1")
    held = trained(piped, MACHINE, piped.shape, head=False)
    one = stages(held, LOAD, BARE)
    pp = piped.train_layout.pp
    took = scoring_time(held, LOAD, BARE)
    mean = sum(stage.forward.seconds for stage in one[1:]) / (pp - 1)
    assert took.parts["bubble"] == pytest.approx((pp - 1) / chunks * mean)
    assert num_microbatches(LOAD, piped.train_layout) % (pp if chunks > 1 else 1) == 0


def test_decoding_one_sequence_reads_all_weights_once():
    held = served(DENSE, MACHINE, 10**6)
    cost = step_cost(held, 1, 0, BARE)
    read = num_params(DENSE.shape) - DENSE.shape.vocab_size * DENSE.shape.hidden_size  # embedding
    assert cost.weights == pytest.approx(2 * read / (3350e9 * 0.7))
    assert cost.cache == cost.communication == cost.overhead == 0
    token = 2 * 2 * 32 * 8 * 128
    assert step_cost(held, 4, 100, BARE).cache == pytest.approx(400 * token / (3350e9 * 0.7))


def test_few_tokens_touch_few_experts_and_many_all():
    held = served(MOE, MACHINE, 10**6)
    few, many = (step_cost(held, batch, 0, BARE).weights for batch in (1, 100_000))
    layer = layer_work(MOE.shape, 0)
    experts = 48 * 2 * layer.expert_params / 8 / (3350e9 * 0.7)
    assert many - few == pytest.approx(experts * (128 - 8))


def test_answers_of_one_length_have_no_tail():
    held = served(MOE, MACHINE, 10**9)
    even = replace(LOAD, answer_tokens=1024, longest_answer_tokens=1024)
    tail = rollout_time(held, even, H100).parts["tail"]
    assert tail == pytest.approx(0, abs=1e-3 * rollout_time(held, even, H100).seconds)
    assert rollout_time(held, LOAD, H100).parts["tail"] > 0


def test_a_rollout_decodes_each_token_once_at_the_full_batch():
    """weights: tokens of a group / its batch steps, beside the tail."""
    held = served(DENSE, MACHINE, 10**9)
    load = replace(LOAD, concurrency=16)
    share = load.answers / 8
    steps = (share - 16) * load.answer_tokens / 16 + load.answer_tokens
    assert steps == share * load.answer_tokens / 16
    wanted = steps * step_cost(held, 16, 0, H100).weights
    assert rollout_time(held, load, H100).parts["weights"] == pytest.approx(wanted)


@given(st.floats(1, 5000), st.floats(1, 10), st.floats(0, 3000))
def test_lengths_have_the_mean_that_they_are_given(mean, ratio, prompt):
    load = Load(1, 1, prompt, mean, mean * ratio, 4096, 8)
    points = 20_000
    alive = sum(load.alive((i + 0.5) / points) for i in range(points)) / points
    assert alive * load.longest_answer_tokens == pytest.approx(mean, rel=1e-2)
    assert load.seen_tokens >= load.sequence_tokens * (1 - 1e-9)


@pytest.mark.parametrize("held", [DENSE, MOE, MLA], ids=["dense", "experts", "latent"])
def test_a_faster_machine_is_not_slower_and_nothing_is_negative(held):
    slow = step_times(held, H100, LOAD, MACHINE, 10**6)
    for took in slow.values():
        assert all(seconds >= 0 for seconds in took.parts.values())
    for name in FASTER + SHARES:
        value = getattr(H100, name)
        faster = H100.model_copy(update={name: value * 2 if name in FASTER else 1.0})
        fast = step_times(held, faster, LOAD, MACHINE, 10**6)
        for span, took in fast.items():
            rest = took.seconds if span.phase != "ROLLOUT" else 0  # its tail is a difference
            assert rest <= slow[span].seconds * (1 + 1e-9), (name, span)
        assert step_seconds(fast, LOAD) <= step_seconds(slow, LOAD) * (1 + 1e-9)
    assert math.isfinite(step_seconds(slow, LOAD))


def test_roles_and_a_checkpoint_have_their_phases():
    full = replace(MOE, reference=True, critic=DENSE.shape, memory=MemorySection(time_slice="all"))
    times = step_times(full, H100, LOAD, MACHINE, 10**6)
    for role in ("actor", "reference", "critic"):
        assert times[Span("SCORE", role)].seconds > 0
    assert times[Span("UPDATE", "critic")].seconds > 0
    assert times[Span("SCORE", "reference")].parts["from host"] > 0
    assert "from host" not in times[Span("SCORE", "actor")].parts
    saved = replace(LOAD, save_every=10)
    extra = step_seconds(times, saved) - step_seconds(times, LOAD)
    assert extra == pytest.approx(times[Span("SAVE")].seconds / 10)
    without = step_times(MOE, H100, LOAD, MACHINE, 10**6)
    assert Span("RESTORE") not in without and Span("SCORE", "critic") not in without


def test_a_state_on_the_host_waits_for_pcie():
    on_host = replace(MOE, memory=MemorySection(optimizer="host"))
    took = [
        step_times(j, BARE, LOAD, MACHINE, 10**6)[Span("UPDATE", "actor")].parts["optimizer"]
        for j in (MOE, on_host)
    ]
    assert took[1] > 10 * took[0]


@pytest.mark.parametrize(
    ("group", "per_node", "nodes"),
    [
        ((8, 1), 8, 1),
        ((32, 1), 8, 4),
        ((4, 8), 1, 4),
        ((4, 2), 4, 1),
        ((8, 4), 2, 4),
        ((1, 9), 1, 1),
    ],
)
def test_a_group_lies_on_its_nodes(group, per_node, nodes):
    found = Group(*group, 8)
    assert (found.per_node, found.nodes) == (per_node, nodes)


def test_collectives_take_what_the_slower_link_needs():
    one, four = Group(8, 1, 8), Group(32, 1, 8)
    bare = BARE.model_copy(update={"collective": 1.0})
    assert gather_s(one, 8e9, bare) == pytest.approx(7 / 8 * 8e9 / 400e9)
    assert gather_s(four, 8e9, bare) == pytest.approx(7 / 8 * 8e9 / 400e9)
    slow = bare.model_copy(update={"nic_gbs": 5.0})
    assert gather_s(four, 8e9, slow) == pytest.approx(3 / 4 * 8e9 / (5e9 * 8))
    assert reduce_s(four, 8e9, bare) == 2 * gather_s(four, 8e9, bare)
    assert exchange_s(four, 8e9, bare) == pytest.approx(24 / 32 * 8e9 / 45e9)
    assert send_s(four, 8e9, bare) == pytest.approx(8e9 / 45e9)
    alone = Group(1, 1, 8)
    for seconds in (gather_s, reduce_s, exchange_s, send_s):
        assert seconds(alone, 8e9, H100) == 0
