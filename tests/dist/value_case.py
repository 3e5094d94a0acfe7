"""A model with a value head in training on one layout, and what is compared between layouts."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.config.schema import ModelSection, OptimizerSection, TrainSection
from rlhf.weights.hf_checkpoint import load_pieces
from rlhf.weights.value_model import load_value_model
from tests.dist.parity_case import (
    CLIP,
    alignment,
    by_sequence,
    gradients,
    layout_of,
    micro_batches,
    sequences,
)
from tests.dist.parity_compare import apart

TOLERANCE = 1e-5


def _loss(num_tokens):
    """Squared distance to a return per token."""

    def loss_fn(values, columns):
        loss = (values - columns["advantages"]).square().sum() / num_tokens
        return loss, {"loss": loss}

    return loss_fn


def _run_case(rank, world, folder, case):
    from rlhf.mcore import parallel
    from rlhf.mcore.forward import train, values
    from rlhf.mcore.model import build_model
    from rlhf.mcore.optimizer import build_optimizer

    layout = layout_of(case, world)
    parallel.initialize(layout, timeout_s=60, seed=1)
    try:
        source = load_value_model(folder, needs_head=True)
        section = ModelSection(path=str(folder), dtype=case.dtype)
        settings = TrainSection(**case.train)
        model = build_model(source.shape, layout, section, settings, trainable=True, head="values")
        pieces = source.pieces(layout, rank)
        load_pieces(folder, pieces, model.params)
        adam = OptimizerSection(lr=1e-3, clip_grad=CLIP)
        optimizer = build_optimizer(model, adam, 3)
        rows = sequences(source.shape.vocab_size)
        mine = list(range(layout.coord(rank).dp, len(rows), layout.dp))
        count = len(mine) if case.unpacked else case.micro
        micro = micro_batches([rows[i] for i in mine], count, alignment(case), case.pad)
        after = values(model, micro, [_after_each_answer_token(m) for m in micro])
        loss_fn = _loss(sum(int(r["mask"].sum()) for r in rows))
        stats = []
        for update in range(3):
            stats.append(train(model, optimizer, micro, loss_fn))
            if update == 0:
                grads = gradients(model, optimizer, stats[0].grad_norm)
        return {
            "values": by_sequence(after, rows, mine, micro),
            "losses": [s.sums["loss"] for s in stats],
            "grad_norms": [s.grad_norm for s in stats],
            "grads": _by_tensor(grads, pieces, model.params),
            "dp": layout.coord(rank).dp,
        }
    finally:
        parallel.shutdown()


def _after_each_answer_token(micro):
    """Also after the last one, which no log-probability needs."""
    return micro.mask | micro.mask.roll(-1)


def _by_tensor(grads, pieces, params):
    """(HF tensor, region) -> what this rank holds of its gradient, NaN where another does."""
    out = {}
    for piece in pieces:
        if not params[piece.param].requires_grad:  # the expert biases
            continue
        flat = np.full(params[piece.param].numel(), np.nan, np.float32)
        for start, part in grads.get(piece.param, []):
            flat[start : start + len(part)] = part
        whole = flat.reshape(tuple(params[piece.param].shape))
        local = whole[tuple(slice(*dim) for dim in piece.local)]
        shape = [stop - start for start, stop in piece.region]
        out[piece.tensor, piece.region] = local.reshape(shape)
    return out


def run_cases(rank, world, folder, cases):
    from rlhf.platform.megatron_cpu import install

    install()
    return {case.name: _run_case(rank, world, Path(folder), case) for case in cases}


def whole_values(ranks):
    """[sequences, tokens] from all replicas; the ranks of one replica must agree bit for bit."""
    for a, b in itertools.combinations(ranks, 2):
        if a["dp"] == b["dp"]:
            np.testing.assert_array_equal(a["values"], b["values"])
    return sum(next(r["values"] for r in ranks if r["dp"] == dp) for dp in {r["dp"] for r in ranks})


def whole_gradients(ranks):
    """HF tensor -> [its size], every element from some rank; elements held twice are equal."""
    sizes: dict[str, tuple[int, ...]] = {}
    for rank in ranks:
        for tensor, region in rank["grads"]:
            stops = tuple(stop for _, stop in region)
            sizes[tensor] = tuple(map(max, stops, sizes.get(tensor, stops)))
    whole = {tensor: np.full(size, np.nan, np.float32) for tensor, size in sizes.items()}
    for rank in ranks:
        for (tensor, region), part in rank["grads"].items():
            target = whole[tensor][tuple(slice(*dim) for dim in region)]
            both = ~np.isnan(part) & ~np.isnan(target)
            np.testing.assert_allclose(part[both], target[both], rtol=1e-4, atol=1e-6)
            np.copyto(target, part, where=~np.isnan(part))
    assert not any(np.isnan(w).any() for w in whole.values())
    return whole


def assert_equals_one_rank(ranks, expected):
    """Values, losses, gradient norms over three Adam steps, and the gradient of each tensor."""
    np.testing.assert_allclose(whole_values(ranks), expected["values"], rtol=0, atol=TOLERANCE)
    for rank in ranks:
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(rank["grad_norms"], expected["grad_norms"], rtol=TOLERANCE)
    _assert_gradients_equal(whole_gradients(ranks), whole_gradients([expected]))


def assert_equals_transformers(outcome, folder):
    """The same of one rank against the body and the head as transformers has them."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    rows = sequences(model.config.vocab_size)
    total = sum(int(r["mask"].sum()) for r in rows)
    loss = torch.zeros(())
    for row, got in zip(rows, outcome["values"], strict=True):
        tokens, mask = row["tokens"], row["mask"]
        values = model.score(model.model(tokens[None]).last_hidden_state)[0, :, 0]
        asked = mask | torch.cat([mask[1:], torch.tensor([False])])
        expected = torch.where(asked, values, 0.0).detach().numpy()
        np.testing.assert_allclose(got[: len(tokens)], expected, rtol=0, atol=TOLERANCE)
        classified = model(tokens[None]).logits[0, 0]  # of the last token
        assert got[len(tokens) - 1] == pytest.approx(float(classified.detach()), abs=TOLERANCE)
        error = values[:-1][mask[1:]] - row["advantages"][mask]
        loss = loss + error.square().sum() / total
    loss.backward()
    assert outcome["losses"][0] == pytest.approx(float(loss.detach()), abs=TOLERANCE)
    wanted = {n: g for name, p in model.named_parameters() for n, g in apart(name, p.grad.numpy())}
    _assert_gradients_equal(whole_gradients([outcome]), wanted)


def _assert_gradients_equal(got, expected):
    assert got.keys() == expected.keys()
    assert "score.weight" in got
    assert "lm_head.weight" not in got
    for name, tensor in expected.items():
        assert np.abs(got[name] - tensor).max() <= TOLERANCE * np.abs(tensor).max(), name
