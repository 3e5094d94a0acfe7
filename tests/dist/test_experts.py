"""Experts in the whole model: routes, biases, and passes outside megatron's schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.config.schema import OptimizerSection
from rlhf.dist.layout import TrainLayout
from rlhf.weights.model_shape import load_model_shape
from tests.dist.parity_case import TEMPERATURE, Case, Loss, build, micro_batches, sequences
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe")
AUX = {"aux_loss": "sequence", "aux_loss_coef": 0.05}
BIAS = {"bias_update_rate": 0.01, "bias_decay": 0.1}


def _routes(model, micro):
    """Layer -> experts [rows, experts] bool of each micro-batch, in a pass without training."""
    from rlhf.mcore.forward import logprobs
    from rlhf.mcore.moe import routers

    seen = {}
    for router in routers(model.decoders):
        rows = seen.setdefault(router.layer_number - 1, [])
        router.register_forward_hook(
            lambda module, args, out, rows=rows: rows.append(out[1].numpy())
        )
    logprobs(model, micro, TEMPERATURE)
    return seen


def _updates(model, settings, micro, loss, count):
    from rlhf.mcore.forward import train
    from rlhf.mcore.optimizer import build_optimizer

    optimizer = build_optimizer(model, settings, 10)
    return [train(model, optimizer, micro, loss, TEMPERATURE) for _ in range(count)]


def _run(rank, world, folders):
    from rlhf.mcore import parallel
    from rlhf.platform.megatron_cpu import install

    install()
    parallel.initialize(TrainLayout(1), timeout_s=60, seed=1)
    settings = OptimizerSection(lr=1e-3)
    rows = sequences(512)
    loss = Loss(sum(int(r["mask"].sum()) for r in rows))
    apart, joined = micro_batches(rows, len(rows), 1), micro_batches(rows, 3, 1)
    # before anything else: a pass inside the schedule would hide what one outside leaves behind
    aux = folders["deepseek_v3"], Case("aux", {"moe": AUX})
    _, _, model = build(rank, world, *aux)
    _pass_outside_the_schedule(model, apart[0])
    out = {"outside": [s.grad_norm for s in _updates(model, settings, joined, loss, 2)]}
    _, _, model = build(rank, world, *aux)
    out["inside"] = [s.grad_norm for s in _updates(model, settings, joined, loss, 2)]
    for family, folder in folders.items():
        _, _, model = build(rank, world, folder, Case("plain"))
        out[family, "routes"] = _routes(model, apart)
    folder = folders["deepseek_v3"]
    for name, case in {
        "frozen": Case("frozen"),
        "moved": Case("moved", {"moe": BIAS}),
        "bf16": Case("bf16", {"moe": BIAS}, dtype="bfloat16"),
    }.items():
        _, _, model = build(rank, world, folder, case)
        biases = [t for n, t in model.params.items() if n.endswith("expert_bias")]
        before = [t.numpy().copy() for t in biases]
        (stats,) = _updates(model, settings, joined, loss, 1)
        after = [t.numpy().copy() for t in biases]
        out[name] = list(zip(before, after, strict=True)), stats.expert_loads.numpy()
    return out


def _pass_outside_the_schedule(model, micro):
    from rlhf.mcore.stream import fold

    logprobs, _ = model.chunks[0](fold(micro, 1), TEMPERATURE)
    logprobs.sum().backward()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {family: make_tiny(base / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def results(folders):
    (out,) = run_ranks(_run, 1, folders, timeout_s=240)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_takes_the_experts_that_it_takes_in_transformers(results, folders, family):
    from transformers import AutoModelForCausalLM

    shape = load_model_shape(folders[family])
    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    taken = {}
    for number, layer in enumerate(model.model.layers):
        if shape.has_experts(number):
            layer.mlp.gate.register_forward_hook(
                lambda module, args, out, number=number: taken.update({number: out[2]})
            )
    assert results[family, "routes"].keys() == {
        n for n in range(shape.num_layers) if shape.has_experts(n)
    }
    for i, row in enumerate(sequences(512)):
        model(row["tokens"][None])
        for number, experts in taken.items():
            expected = torch.zeros(len(experts), 8, dtype=torch.bool).scatter(1, experts, True)
            got = results[family, "routes"][number][i]
            # the last token predicts nothing and is left out
            assert np.array_equal(got, expected.numpy()[: len(got)])
            assert len(got) == len(row["tokens"]) - 1


def test_biases_stay_unless_told_to_move(results):
    biases, _ = results["frozen"]
    assert len(biases) == 3
    for before, after in biases:
        assert np.array_equal(before, after)


@pytest.mark.parametrize("name", ["moved", "bf16"])
def test_biases_follow_the_loads_in_float32(results, name):
    """arXiv:2408.15664, Algorithm 1, then the decay; bfloat16 would lose steps of this size."""
    biases, loads = results[name]
    for (before, after), load in zip(biases, loads, strict=True):
        assert after.dtype == np.float32
        step = np.sign(load.mean() - load) * 0.01
        np.testing.assert_allclose(after, (before + step) * 0.9, rtol=1e-6, atol=1e-7)
        assert np.abs(step).max() > 0


def test_a_pass_outside_the_schedule_leaves_no_trace(results):
    """Megatron keeps the scale of auxiliary losses in a class; ours has no such state."""
    assert results["outside"] == results["inside"]
