"""What a layout must have in common with one rank, from the outcomes of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf.dist.layout import TrainLayout
from rlhf.weights.families import train_param_shapes, train_pieces
from tests.dist.parity_case import Case, Outcome, layout_of

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
    assert got.keys() == one.keys()
    for name, tensor in one.items():
        largest = np.abs(tensor).max()
        assert largest > 0, name
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


def whole_gradients(
    shape: Any, layout: TrainLayout, ranks: Sequence[Outcome]
) -> dict[str, np.ndarray]:
    """HF tensor -> its gradient, put together from the ranks' ranges; ranks of one place in tp and
    pp hold ranges of the same parameters."""
    local: list[dict[str, np.ndarray]] = []
    for rank in range(layout.world):
        at = layout.coord(rank)
        whole = {
            name: np.full(int(np.prod(size)), np.nan, np.float32)
            for name, size in train_param_shapes(shape, layout, rank).items()
        }
        for other, outcome in enumerate(ranks):
            if layout.coord(other).tp == at.tp and layout.coord(other).pp == at.pp:
                for name, parts in outcome.grads.items():
                    for start, values in parts:
                        whole[name][start : start + len(values)] = values
        local.append(whole)
    return whole_tensors(shape, layout, local)


def whole_tensors(
    shape: Any, layout: TrainLayout, local: Sequence[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """HF tensor -> its values, from each rank's parameters; parts held twice are equal."""
    whole: dict[str, np.ndarray] = {}
    for rank in range(layout.world):
        shapes = train_param_shapes(shape, layout, rank)
        for piece in train_pieces(shape, layout, rank):
            part = local[rank][piece.param].reshape(shapes[piece.param])[_slices(piece.local)]
            assert not np.isnan(part).any(), piece
            _put(whole, piece, part)
    return whole


def _put(whole: dict[str, np.ndarray], piece: Any, part: np.ndarray) -> None:
    size = [max(stop, n) for (_, stop), n in zip(piece.region, _size(whole, piece), strict=True)]
    if piece.tensor not in whole or list(whole[piece.tensor].shape) != size:
        grown = np.full(size, np.nan, np.float32)
        if piece.tensor in whole:
            grown[tuple(slice(n) for n in whole[piece.tensor].shape)] = whole[piece.tensor]
        whole[piece.tensor] = grown
    target = whole[piece.tensor][_slices(piece.region)]
    known = ~np.isnan(target)
    part = part.reshape(target.shape)
    np.testing.assert_allclose(target[known], part[known], rtol=1e-4, atol=1e-6)
    target[...] = part


def _size(whole: dict[str, np.ndarray], piece: Any) -> Sequence[int]:
    return whole[piece.tensor].shape if piece.tensor in whole else [0] * len(piece.region)


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
