"""Passes on two ranks: what must hold besides equal numbers in every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.config.schema import OptimizerSection
from rlhf.dist.layout import TrainLayout
from tests.dist.parity_case import (
    LAYOUT_KEYS,
    TEMPERATURE,
    Case,
    Loss,
    build,
    micro_batches,
    run_case,
    sequences,
)
from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny

PP2 = Case("pp2", {"pp": 2})
DP2 = Case("dp2", {"overlap": True})
SETTINGS = OptimizerSection(lr=1e-2, clip_grad=0.0)


def _start(rank, world, folder, case):
    """(model, optimizer, micro-batches, loss) on the grid of ``case``."""
    from rlhf.mcore import parallel
    from rlhf.mcore.optimizer import build_optimizer

    layout = TrainLayout(world, **{k: v for k, v in case.train.items() if k in LAYOUT_KEYS})
    parallel.initialize(layout, timeout_s=60, seed=1)
    shape, layout, model = build(rank, world, folder, case)
    optimizer = build_optimizer(model, SETTINGS, 10)
    rows = sequences(shape.vocab_size)
    mine = rows[layout.coord(rank).dp :: layout.dp]
    loss = Loss(sum(int(r["mask"].sum()) for r in rows))
    return model, optimizer, micro_batches(mine, case.micro, layout.tp), loss


def _copy(model):
    return {name: p.detach().clone() for name, p in model.params.items()}


def frozen_reference(rank, world, folder):
    """Actor and reference in one process: the actor moves, the reference does not."""
    from rlhf.mcore.forward import logprobs, train

    model, optimizer, micro, loss = _start(rank, world, folder, PP2)
    _, _, reference = build(rank, world, folder, PP2, trainable=False)
    before = logprobs(model, micro, TEMPERATURE)
    kept = _copy(reference)
    seen = []

    def loss_fn(logprobs, entropy, columns):
        seen.append(logprobs.detach())
        return loss(logprobs, entropy, columns)

    train(model, optimizer, micro, loss_fn, TEMPERATURE)
    mask = torch.cat([m.mask for m in micro])
    after = logprobs(model, micro, TEMPERATURE)
    of_reference = logprobs(reference, micro, TEMPERATURE)
    return {
        "equal_before": torch.equal(before, of_reference),
        "moved": float((after - before).abs().max()),
        "same_weights": all(torch.equal(kept[n], p) for n, p in reference.params.items()),
        "no_gradients": not any(p.requires_grad for p in reference.params.values()),
        "has_graph": after.requires_grad or of_reference.requires_grad,
        "empty": len(logprobs(model, [], TEMPERATURE)),
        "untrained": float(after[~mask].abs().max()),
        "ratio_is_one": not seen or torch.equal(torch.cat(seen), before[mask]),
    }


def released_gradients(rank, world, folder):
    """Memory goes when gradients are released, and updates stay what they would have been."""
    from rlhf.mcore import parallel
    from rlhf.mcore.forward import train

    out = {}
    for case in (PP2, DP2):
        weights, num_bytes = [], []
        for release in (False, True):
            model, optimizer, micro, loss = _start(rank, world, folder, case)
            for _ in range(2):
                train(model, optimizer, micro, loss, TEMPERATURE)
                if release:
                    model.release_gradients()
            buffers = [b.grad_data for chunk in model.chunks for b in chunk.buffers]
            num_bytes.append(sum(b.untyped_storage().size() for b in buffers))
            weights.append(torch.cat([p.detach().flatten() for p in model.params.values()]))
            parallel.shutdown()
        out[case.name] = (num_bytes, torch.equal(*weights))
    return out


def params_are_complete(rank, world, folder):
    """With overlap, parameters after train() are those of every rank, not only of the own shard."""
    from rlhf.mcore.forward import logprobs, train

    model, optimizer, micro, loss = _start(rank, world, folder, DP2)
    train(model, optimizer, micro, loss, TEMPERATURE, gather_params=False)
    train(model, optimizer, micro, loss, TEMPERATURE)
    sums = torch.stack([p.detach().double().sum() for p in model.params.values()])
    gathered = [torch.empty_like(sums) for _ in range(world)]
    torch.distributed.all_gather(gathered, sums)
    scored = logprobs(model, micro, TEMPERATURE)
    return {
        "equal": torch.equal(gathered[0], gathered[1]),
        "sums": sums.numpy(),
        "finite": bool(scored.isfinite().all()),
    }


def nothing_trained_in_one_micro_batch(rank, world, folder):
    """A loss that is a constant for an empty micro-batch: same update as without that one."""
    from rlhf.mcore.forward import train

    out = {}
    for case in (PP2, DP2):
        norms = []
        for with_empty in (False, True):
            from rlhf.mcore import parallel

            model, optimizer, micro, loss = _start(rank, world, folder, case)
            if with_empty:
                empty = replace(micro[0], mask=torch.zeros_like(micro[0].mask))
                micro = [micro[0], empty, *micro[1:]]

            def loss_fn(logprobs, entropy, columns, loss=loss):
                if len(logprobs):
                    return loss(logprobs, entropy, columns)
                return torch.tensor(0.0), {"loss": torch.zeros(()), "entropy": torch.zeros(())}

            stats = train(model, optimizer, micro, loss_fn, TEMPERATURE)
            norms.append((stats.grad_norm, stats.sums["loss"]))
            parallel.shutdown()
        out[case.name] = norms
    return out


def unequal_counts(rank, world, folder):
    from rlhf.mcore.forward import train

    model, optimizer, micro, loss = _start(rank, world, folder, DP2)
    try:
        train(model, optimizer, micro[: 2 + rank], loss, TEMPERATURE)
    except AssertionError as error:
        return str(error)
    return "no error"


def not_a_number(rank, world, folder):
    """A gradient that is not finite leaves weights and moments as they are."""
    from rlhf.mcore.forward import train

    model, optimizer, micro, loss = _start(rank, world, folder, PP2)
    before = _copy(model)

    def broken(logprobs, entropy, columns):
        value, sums = loss(logprobs, entropy, columns)
        return value * math.nan, sums

    bad = train(model, optimizer, micro, broken, TEMPERATURE)
    kept = all(torch.equal(before[n], p) for n, p in model.params.items())
    good = train(model, optimizer, micro, loss, TEMPERATURE)
    finite = all(bool(p.isfinite().all()) for p in model.params.values())
    return {"ok": (bad.ok, good.ok), "kept": kept, "finite": finite, "lr": good.lr}


def first_token_trained(rank, world, folder):
    from rlhf.mcore.forward import logprobs

    model, _, micro, _ = _start(rank, world, folder, PP2)
    wrong = replace(micro[0], mask=torch.ones_like(micro[0].mask))
    try:
        logprobs(model, [wrong], TEMPERATURE)
    except AssertionError as error:
        return str(error)
    return "no error"


def bfloat16(rank, world, folder):
    return {
        case.name: run_case(rank, world, folder, replace(case, dtype="bfloat16"))
        for case in (PP2, DP2, Case("tp2", {"tp": 2, "sequence_parallel": True}))
    } | {"float32": run_case(rank, world, folder, PP2)}


def vocabulary_parallel_head(rank, world, folder):
    """LinearLogprobs over two ranks; the parent compares with the naive form."""
    from rlhf.mcore.logprobs import HeadSettings, linear_logprobs

    hidden, weight, targets, grads = head_inputs()
    half = 260  # 515 tokens padded to 520
    local = torch.nn.functional.pad(weight, (0, 0, 0, 5))[rank * half : (rank + 1) * half]
    local = local.clone().requires_grad_()
    hidden.requires_grad_()
    settings = HeadSettings(
        temperature=0.7,
        first_column=rank * half,
        num_columns=min(half, len(weight) - rank * half),
        chunk_rows=16,
        fp32=True,
        group=torch.distributed.group.WORLD,
    )
    logprobs, entropy = linear_logprobs(
        hidden, local, torch.arange(len(targets)), targets, settings
    )
    torch.autograd.backward([logprobs, entropy], list(grads))
    parts = (logprobs.detach(), entropy.detach(), hidden.grad, local.grad)
    return [part.numpy() for part in parts]


def gloo_collectives(rank, world, folder):
    """What the stand-ins add: averages and pieces of unequal sizes."""
    dist = torch.distributed
    average = torch.tensor([float(rank), 4.0])
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    shard = torch.empty(1)
    dist.reduce_scatter_tensor(shard, torch.tensor([2.0, 6.0]) * (rank + 1), op=dist.ReduceOp.AVG)
    pieces = [torch.empty(1, 2), torch.empty(3, 2)]
    dist.all_gather(pieces, torch.full((1 + 2 * rank, 2), float(rank)))
    summed = torch.empty(1 + 2 * rank, 2)
    dist.reduce_scatter(summed, [torch.ones(1, 2), torch.full((3, 2), 2.0)])
    return [x.numpy() for x in (average, shard, *pieces, summed)]


def head_inputs():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(50, 24, generator=generator)
    weight = torch.randn(515, 24, generator=generator)
    targets = torch.randint(0, 515, (50,), generator=generator)
    return hidden, weight, targets, torch.randn(2, 50, generator=generator)


EXPERIMENTS = (
    released_gradients,
    frozen_reference,
    params_are_complete,
    nothing_trained_in_one_micro_batch,
    unequal_counts,
    not_a_number,
    first_token_trained,
    bfloat16,
    vocabulary_parallel_head,
    gloo_collectives,
)


def _run_all(rank, world, folder):
    from rlhf.mcore import parallel
    from rlhf.platform.megatron_cpu import install

    assert install()
    out = {}
    for experiment in EXPERIMENTS:
        out[experiment.__name__] = experiment(rank, world, Path(folder))
        parallel.shutdown()
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2", vocab_size=515)
    ranks = run_ranks(_run_all, 2, str(folder), timeout_s=240)
    return {e.__name__: [r[e.__name__] for r in ranks] for e in EXPERIMENTS}


def test_the_reference_stays_where_the_actor_began(results):
    for rank in results["frozen_reference"]:
        assert rank["equal_before"]
        assert rank["ratio_is_one"], "scored before the update and in it: the same bits"
        assert rank["moved"] > 1e-3
        assert rank["same_weights"]
        assert rank["no_gradients"]
        assert not rank["has_graph"]
        assert rank["untrained"] == 0
        assert rank["empty"] == 0


def test_released_gradients_hold_no_memory_and_change_nothing(results):
    for rank in results["released_gradients"]:
        for (kept, released), equal in rank.values():
            assert kept > 0
            assert released == 0
            assert equal


def test_parameters_are_complete_after_an_overlapped_update(results):
    first, second = results["params_are_complete"]
    assert first["equal"]
    np.testing.assert_array_equal(first["sums"], second["sums"])
    assert first["finite"] and second["finite"]


def test_a_micro_batch_without_trained_tokens_changes_nothing(results):
    for rank in results["nothing_trained_in_one_micro_batch"]:
        for without, with_empty in rank.values():
            np.testing.assert_allclose(with_empty, without, rtol=1e-6)


def test_unequal_micro_batch_counts_are_refused_on_every_rank(results):
    for message in results["unequal_counts"]:
        assert "got 2 to 3" in message


def test_a_gradient_that_is_not_finite_is_left_out(results):
    for rank in results["not_a_number"]:
        assert rank["ok"] == (False, True)
        assert rank["kept"]
        assert rank["finite"]


def test_the_first_token_of_a_sequence_cannot_be_trained(results):
    for message in results["first_token_trained"]:
        assert "first token" in message


@pytest.mark.parametrize("layout", ["pp2", "dp2", "tp2"])
def test_bfloat16_follows_float32(results, layout):
    for rank in results["bfloat16"]:
        got, expected = rank[layout], rank["float32"]
        np.testing.assert_allclose(got.losses, expected.losses, atol=0.03)
        np.testing.assert_allclose(got.grad_norms, expected.grad_norms, rtol=0.05)


def test_vocabulary_parallel_logprobs_equal_the_naive_form(results):
    hidden, weight, targets, grads = head_inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    torch.autograd.backward([logprobs, entropy], list(grads.double()))
    expected_weight = torch.nn.functional.pad(weight.grad, (0, 0, 0, 5)).split(260)
    for rank, got in enumerate(results["vocabulary_parallel_head"]):
        expected = (logprobs.detach(), entropy.detach(), hidden.grad, expected_weight[rank])
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-5 * float(b.abs().max()))


def test_gloo_stand_ins_average_and_take_unequal_pieces(results):
    for rank, got in enumerate(results["gloo_collectives"]):
        average, shard, small, large, summed = got
        np.testing.assert_allclose(average, [0.5, 4.0])
        np.testing.assert_allclose(shard, [[3.0], [9.0]][rank])
        np.testing.assert_array_equal(small, np.zeros((1, 2)))
        np.testing.assert_array_equal(large, np.ones((3, 2)))
        np.testing.assert_array_equal(summed, np.full((1 + 2 * rank, 2), 2.0 * (rank + 1)))
