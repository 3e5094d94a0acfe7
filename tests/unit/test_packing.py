"""Laws of the schedule: everything once, equal counts, under the budget, even in cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.bench.packing import log_normal_lengths
from rlhf.packing import Budget, SequenceCost, partition, schedule_microbatches, sequence_cost
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.tiny_models import make_tiny

COST = SequenceCost(per_token=1.0, per_square=1e-3)


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    dp=st.integers(1, 5),
    cap=st.integers(64, 200),
    align=st.sampled_from([1, 2, 8]),
    multiple=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=200, deadline=None)
def test_schedule_holds_each_sequence_once_under_the_budget(lengths, dp, cap, align, multiple):
    budget = Budget(tokens=cap, align=align, multiple=multiple)
    schedule = schedule_microbatches(lengths, dp, budget, COST)
    assert sorted(i for rank in schedule for micro in rank for i in micro) == list(
        range(len(lengths))
    )
    assert len({len(rank) for rank in schedule}) == 1
    assert len(schedule[0]) % multiple == 0
    assert all(sum(budget.rounded(lengths[i]) for i in m) <= cap for rank in schedule for m in rank)


def test_too_long_sequence_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"33 tokens.*32"):
        schedule_microbatches([5, 33, 4], 1, Budget(32), COST)


def test_partition_is_even_on_log_normal_lengths():
    rng = np.random.default_rng(0)
    costs = np.minimum(rng.lognormal(7, 1, 512), 32768).tolist()
    loads = [sum(costs[i] for i in group) for group in partition(costs, 8)]
    assert max(loads) / (sum(loads) / 8) < 1.01


@pytest.mark.parametrize("seed", [0, 4, 8])
def test_long_batches_need_no_more_micro_batches_than_their_tokens(seed):
    """1024 log-normal lengths up to the budget; with seeds 4 and 8 less than 0.4 % is left free."""
    lengths = log_normal_lengths(1024, seed)
    budget, cost = Budget(32768, align=8), SequenceCost(1.3e10, 2e5)
    schedule = schedule_microbatches(lengths, 8, budget, cost)
    assert len(schedule[0]) == budget.fewest(sum(map(budget.rounded, lengths)), 8)
    loads = [sum(cost(lengths[i]) for micro in rank for i in micro) for rank in schedule]
    assert max(loads) * 8 / sum(loads) < 1.01
    assert sorted(i for rank in schedule for micro in rank for i in micro) == list(range(1024))
    assert all(sum(budget.rounded(lengths[i]) for i in m) <= 32768 for r in schedule for m in r)


@given(
    groups=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=12),
    dp=st.integers(1, 4),
    cap=st.integers(40, 200),
    multiple=st.sampled_from([1, 2]),
)
@settings(max_examples=200, deadline=None)
def test_keeping_samples_of_a_prompt_together_costs_nothing(groups, dp, cap, multiple):
    lengths = [n for group in groups for n in group]
    of = [g for g, group in enumerate(groups) for _ in group]
    budget = Budget(cap, multiple=multiple)
    apart = schedule_microbatches(lengths, dp, budget, COST)
    together = schedule_microbatches(lengths, dp, budget, COST, of)
    assert sorted(i for rank in together for m in rank for i in m) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in m) <= cap for rank in together for m in rank)
    assert {len(rank) for rank in together} == {len(apart[0])}
    heaviest = [
        max(sum(COST(lengths[i]) for m in rank for i in m) for rank in schedule)
        for schedule in (apart, together)
    ]
    assert heaviest[1] <= 1.01 * max(heaviest[0], sum(map(COST, lengths)) / dp)


def test_samples_of_a_prompt_share_a_micro_batch():
    lengths = [20 + i % 3 for i in range(128)]
    of = [i // 8 for i in range(128)]
    schedule = schedule_microbatches(lengths, 2, Budget(400), COST, of)
    homes = {(of[i], (r, m)) for r in (0, 1) for m, micro in enumerate(schedule[r]) for i in micro}
    assert len(homes) == 16


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "moonlight", "glm4_moe"])
def test_the_cost_of_a_token_is_two_flop_per_weight_that_it_meets(tmp_path, family):
    """Counted in transformers' model: all matrices but embedding and head, of experts the chosen.

    A sequence of n tokens needs half of n * n scores, per head as many products as heads are wide.
    """
    import transformers

    folder = make_tiny(tmp_path, family)
    shape, cost = load_model_shape(folder), sequence_cost(load_model_shape(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = 0.0
    for name, parameter in model.model.layers.named_parameters():
        if ".mlp.experts." in name:
            assert shape.moe is not None
            weights += parameter.numel() * shape.moe.num_experts_per_token / shape.moe.num_experts
        elif parameter.dim() == 2:
            weights += parameter.numel()
    assert cost.per_token == 2 * weights
    value = shape.mla.v_head_dim if shape.mla else shape.head_dim
    assert cost.per_square == shape.num_layers * shape.num_heads * (shape.head_dim + value)
