"""Routing equals transformers', and its statistics don't depend on how sequences are packed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlhf.config.schema import ExpertsSection
from rlhf.mcore.router import ExpertRouter, choose_experts, expert_scores, expert_weights
from tests.helpers.shapes import make_experts

HIDDEN = 8
# 3 experts of 2 groups: megatron's group score would sum 3 // 2 = 1 expert, ours and HF's sum 2
GROUPED = make_experts(
    num_experts=16,
    num_experts_per_token=3,
    scoring="sigmoid",
    scaling_factor=2.5,
    num_groups=4,
    topk_groups=2,
    expert_bias=True,
)
PLAIN = make_experts(num_experts=16, num_experts_per_token=3)


def _route(moe, logits, bias=None):
    """[rows, experts] weights, zero where not chosen."""
    scores = expert_scores(logits, moe)
    experts = choose_experts(scores, bias, moe)
    return torch.zeros_like(scores).scatter(1, experts, expert_weights(scores, experts, moe))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.3, 5.0])
def test_grouped_sigmoid_routing_equals_deepseek(normalize, spread):
    """Also with biases that push scores below zero."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    moe = replace(GROUPED, normalize_topk=normalize)
    hf = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            n_routed_experts=16,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=normalize,
        )
    )
    torch.nn.init.normal_(hf.weight)
    hf.e_score_correction_bias.normal_(0, max(spread, 1e-9))
    hidden = torch.randn(200, HIDDEN)
    logits, weights, experts = hf(hidden)
    expected = torch.zeros(200, 16).scatter(1, experts, weights)
    got = _route(moe, logits, hf.e_score_correction_bias)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_routing_equals_qwen3(normalize):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    hf = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=HIDDEN, num_experts=16, num_experts_per_tok=3, norm_topk_prob=normalize
        )
    )
    torch.nn.init.normal_(hf.weight)
    logits, weights, experts = hf(torch.randn(200, HIDDEN))
    expected = torch.zeros(200, 16).scatter(1, experts, weights)
    got = _route(replace(PLAIN, normalize_topk=normalize), logits)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def _router(group, moe=GROUPED, dtype=torch.float32, **settings):
    from rlhf.platform.megatron_cpu import install

    install()
    config = SimpleNamespace(hidden_size=HIDDEN, params_dtype=dtype, sequence_parallel=False)
    groups = SimpleNamespace(tp_cp=group, tp_dp_cp=group)
    torch.manual_seed(0)
    router = ExpertRouter(
        config=config, pg_collection=groups, moe=moe, settings=ExpertsSection(**settings)
    )
    torch.nn.init.normal_(router.weight)
    return router


TREE = torch.tensor(
    [[1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 1, 0]], dtype=torch.bool
)  # two sequences that share two rows; the last row is padding
LOSSES = [
    {"aux_loss": "sequence", "aux_loss_coef": 0.3},
    {"aux_loss": "global", "aux_loss_coef": 0.3},
    {"z_loss_coef": 0.2},
    {"aux_loss": "sequence", "aux_loss_coef": 0.3, "z_loss_coef": 0.2},
]


def _gradient(router, passes, num_tokens, num_sequences):
    """Of the router's losses alone, and the loads, over several forward passes."""
    router.begin_update(num_tokens, num_sequences)
    router.weight.grad = None
    outs = [router(hidden[:, None], members)[0] for hidden, members in passes]
    (0 * sum(out.sum() for out in outs)).backward()
    return router.weight.grad, router.loads


@pytest.mark.parametrize("settings", LOSSES)
def test_shared_rows_count_once_per_sequence(group, settings):
    """A folded pass gives the losses and loads of the sequences one after the other."""
    router = _router(group, **settings)
    hidden = torch.randn(6, HIDDEN)
    rows = torch.cat([hidden[TREE[0]], hidden[TREE[1]]])
    apart = torch.zeros(2, 7, dtype=torch.bool)
    apart[0, :3] = apart[1, 3:] = True
    expected, loads = _gradient(router, [(rows, apart)], 7, 2)
    got, folded_loads = _gradient(router, [(hidden, TREE)], 7, 2)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(folded_loads, loads)
    assert loads.sum() == 7 * 3


@pytest.mark.parametrize("settings", [LOSSES[0], LOSSES[2]])
def test_losses_do_not_depend_on_the_split_into_micro_batches(group, settings):
    router = _router(group, **settings)
    a, b = torch.randn(3, HIDDEN), torch.randn(4, HIDDEN)
    both = torch.zeros(2, 7, dtype=torch.bool)
    both[0, :3] = both[1, 3:] = True
    expected, _ = _gradient(router, [(torch.cat([a, b]), both)], 7, 2)
    passes = [(x, torch.ones(1, len(x), dtype=torch.bool)) for x in (a, b)]
    got, _ = _gradient(router, passes, 7, 2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_the_sequence_loss_is_that_of_the_paper(group):
    """arXiv:2412.19437, Eq. 17 to 20, written out for one sequence."""
    router = _router(group, **LOSSES[0])
    hidden = torch.randn(5, HIDDEN)
    got, _ = _gradient(router, [(hidden, torch.ones(1, 5, dtype=torch.bool))], 5, 1)
    weight = router.weight.detach().clone().requires_grad_()
    scores = (hidden @ weight.t()).sigmoid()
    best = torch.zeros_like(scores).scatter(1, scores.topk(3, -1).indices, 1.0)
    loads = 16 / (3 * 5) * best.sum(0)
    shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
    (0.3 * (loads * shares).sum()).backward()
    torch.testing.assert_close(got, weight.grad, rtol=1e-5, atol=1e-7)


def test_the_global_loss_sees_the_loads_of_earlier_micro_batches(group):
    router = _router(group, **LOSSES[1])
    hidden = torch.randn(5, HIDDEN)
    whole = torch.ones(1, 5, dtype=torch.bool)
    alone, _ = _gradient(router, [(hidden, whole)], 5, 1)
    after, _ = _gradient(router, [(torch.randn(5, HIDDEN), whole), (hidden, whole)], 5, 1)
    assert (after - alone).abs().max() > 1e-4


def test_padding_goes_to_no_expert(group):
    router = _router(group)
    weights, chosen = router(torch.randn(6, 1, HIDDEN), TREE)
    assert chosen.sum(1).tolist() == [3, 3, 3, 3, 3, 0]
    assert torch.equal(weights != 0, chosen)


def test_loads_are_counted_in_training_passes_only(group):
    router = _router(group)
    hidden = torch.randn(6, 1, HIDDEN)
    with torch.no_grad():  # also the first pass of a recomputed layer
        router(hidden, TREE)
    router.eval()
    router(hidden, TREE)
    assert router.loads.sum() == 0


def test_routing_is_float32_in_a_bfloat16_model(group):
    router = _router(group, dtype=torch.bfloat16)
    hidden = torch.randn(6, 1, HIDDEN, dtype=torch.bfloat16)
    weights, _ = router(hidden, TREE)
    assert (weights.dtype, router.expert_bias.dtype) == (torch.float32, torch.float32)
    logits = hidden[:, 0].float() @ router.weight.float().t()
    expected = _route(GROUPED, logits, router.expert_bias) * TREE.any(0)[:, None]
    torch.testing.assert_close(weights, expected)
