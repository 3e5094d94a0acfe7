"""What a layout must have in common with one rank, from the outcomes of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf.dist.layout import TrainLayout
from rlhf.weights.families import train_param_shapes, train_pieces
from rlhf.weights.model_shape import load_model_shape
from rlhf.weights.piece import Piece
from tests.dist.parity_case import TEMPERATURE, Case, Loss, Outcome, layout_of, sequences

TOLERANCE = 1e-5


def assert_losses_and_norms_equal(ranks: Sequence[Outcome], expected: Outcome) -> None:
    """Also the entropies; of all updates, on every rank."""
    for outcome in ranks:
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(outcome.entropies, expected.entropies, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=TOLERANCE)


def assert_gradients_equal(
    shape: Any, case: Case, ranks: Sequence[Outcome], expected: Outcome
) -> None:
    """Each tensor's, to the tolerance times its largest element."""
    one = whole_gradients(shape, TrainLayout(1), [expected])
    got = whole_gradients(shape, layout_of(case, len(ranks)), ranks)
    _assert_tensors_equal(got, one)


def _assert_tensors_equal(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = np.abs(tensor).max()
        assert largest > 0 or ".experts." in name, name  # an expert may see no token
        assert np.abs(got[name] - tensor).max() <= TOLERANCE * largest, name


def assert_logprobs_equal(case: Case, ranks: Sequence[Outcome], expected: Outcome) -> None:
    """The same bits on all ranks of a replica, and together those of one rank."""
    layout = layout_of(case, len(ranks))
    whole = np.zeros_like(expected.logprobs)
    for dp in range(layout.dp):
        of_replica = [r.logprobs for i, r in enumerate(ranks) if layout.coord(i).dp == dp]
        for other in of_replica[1:]:
            np.testing.assert_array_equal(other, of_replica[0])
        whole += of_replica[0]  # replicas hold other sequences
    np.testing.assert_allclose(whole, expected.logprobs, rtol=0, atol=TOLERANCE)


def assert_equals_transformers(folder: Path, outcome: Outcome) -> None:
    """Log-probabilities of each sequence alone, the loss, and the gradient of each tensor."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    shape = load_model_shape(folder)
    rows = sequences(shape.vocab_size)
    loss_fn = Loss(sum(int(r["mask"].sum()) for r in rows))
    total = 0.0
    for row, got in zip(rows, outcome.logprobs, strict=True):
        tokens, trained = row["tokens"], row["mask"][1:]
        log_p = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs = log_p.gather(1, tokens[1:, None])[:, 0]
        expected = torch.where(trained, logprobs, 0.0).detach().numpy()
        np.testing.assert_allclose(got[1 : len(tokens)], expected, rtol=0, atol=TOLERANCE)
        entropy = -(log_p.exp() * log_p).sum(-1)
        columns = {"advantages": row["advantages"][1:][trained]}
        loss, _ = loss_fn(logprobs[trained], entropy[trained], columns)
        loss.backward()
        total += loss.item()
    assert abs(outcome.losses[0] - total) <= TOLERANCE
    wanted = {n: g for name, p in model.named_parameters() for n, g in apart(name, p.grad.numpy())}
    _assert_tensors_equal(whole_gradients(shape, TrainLayout(1), [outcome]), wanted)


def apart(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """In a checkpoint each expert has its tensors; transformers holds those of a layer as one."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith("mlp.experts"):
        yield name, tensor
        return
    for i, expert in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{i}.down_proj.weight", expert
        else:
            gate, up = np.split(expert, 2)
            yield f"{prefix}.{i}.gate_proj.weight", gate
            yield f"{prefix}.{i}.up_proj.weight", up


def whole_gradients(
    shape: Any, layout: TrainLayout, ranks: Sequence[Outcome]
) -> dict[str, np.ndarray]:
    """HF tensor -> its gradient, put together from the ranks' ranges."""
    local: list[dict[str, np.ndarray]] = []
    for rank, outcome in enumerate(ranks):
        shapes = train_param_shapes(shape, layout, rank)
        known = {}
        for name, parts in outcome.grads.items():
            flat = np.full(int(np.prod(shapes[name])), np.nan, np.float32)
            for start, values in parts:
                flat[start : start + len(values)] = values
            known[name] = flat.reshape(shapes[name])
        local.append(known)
    return whole_tensors([train_pieces(shape, layout, r) for r in range(layout.world)], local)


def whole_tensors(
    pieces: Sequence[Sequence[Piece]], local: Sequence[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """HF tensor -> its values, from what each rank knows of its parameters (NaN: not known); parts
    held twice are equal."""
    whole: dict[str, np.ndarray] = {}
    for of_rank, params in zip(pieces, local, strict=True):
        for piece in of_rank:
            if piece.param in params:
                _put(whole, piece, params[piece.param][_slices(piece.local)])
    for name, tensor in whole.items():
        assert not np.isnan(tensor).any(), name
    return whole


def _put(whole: dict[str, np.ndarray], piece: Any, part: np.ndarray) -> None:
    size = [max(stop, n) for (_, stop), n in zip(piece.region, _size(whole, piece), strict=True)]
    if piece.tensor not in whole or list(whole[piece.tensor].shape) != size:
        grown = np.full(size, np.nan, np.float32)
        if piece.tensor in whole:
            grown[tuple(slice(n) for n in whole[piece.tensor].shape)] = whole[piece.tensor]
        whole[piece.tensor] = grown
    target = whole[piece.tensor][_slices(piece.region)]
    part = part.reshape(target.shape)
    known, fresh = ~np.isnan(target), ~np.isnan(part)
    np.testing.assert_allclose(target[known & fresh], part[known & fresh], rtol=1e-4, atol=1e-6)
    target[fresh] = part[fresh]


def _size(whole: dict[str, np.ndarray], piece: Any) -> Sequence[int]:
    return whole[piece.tensor].shape if piece.tensor in whole else [0] * len(piece.region)


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
