"""The way back: a training shard whose memory was released, rebuilt from live engines.

What the engine has is what the last reshard brought there, so a restore gives the weights of that
moment. Every rank drives one movement through the window and the areas that the reshard has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.weights.families import rollout_pieces, train_param_shapes, train_pieces
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.piece import FLOAT8, box_size

MAX_SHOWN = 12


def kept_rows(
    shape: ModelShape,
    train: TrainLayout,
    rollout: RolloutLayout,
    rank: int,
    params: Mapping[str, Tensor],
    engine_dtype: torch.dtype,
) -> dict[str, int]:
    """What no engine has: parameter -> the first of its rows that hold vocabulary padding.

    A release must keep these rows; everything else a restore rebuilds bit by bit.

    Args:
        params: all that the rank trains, by the names of ``train_pieces``.
        engine_dtype: of the engine's parameters that have no dtype of their own.

    Raises:
        ValueError: there are parameters that an engine cannot give back exactly; names them and
            why.
    """
    whole = RolloutLayout(1, quantization=rollout.quantization)  # a dtype is the same in any cut
    held = {p.tensor: p.dtype for p in rollout_pieces(shape, whole, 0)}
    covered: dict[str, int] = defaultdict(int)
    rows: dict[str, int] = defaultdict(int)
    faults: dict[str, str] = {}
    for piece in train_pieces(shape, train, rank):
        covered[piece.param] += box_size(piece.local)
        rows[piece.param] = max(rows[piece.param], piece.local[0][1])
        own = held[piece.tensor]
        dtype = engine_dtype if own is None else getattr(torch, own)
        if fault := _fault(params[piece.param].dtype, dtype, own):
            faults[piece.param] = fault
    tables = train_param_shapes(shape, train, rank)
    kept = {}
    for name, param in params.items():
        if name not in tables:
            faults[name] = "the engine has nothing of it"
        elif covered[name] == param.numel():
            continue
        elif covered[name] == rows[name] * (param.numel() // param.shape[0]):
            kept[name] = rows[name]
        else:
            faults[name] = f"the engine has {covered[name]} of its {param.numel()} elements"
    if faults:
        raise ValueError(_refusal(rank, faults))
    return kept


def _fault(wanted: torch.dtype, dtype: torch.dtype, own: str | None) -> str | None:
    """Why what is trained in ``wanted`` cannot be had from the engine's ``dtype``."""
    if own == FLOAT8:
        return "the engine has it in blocks of fp8"
    if wanted == dtype or (wanted, dtype) == (torch.bfloat16, torch.float32):
        return None
    return f"it is trained in {wanted} and the engine has it in {dtype}"


def _refusal(rank: int, faults: Mapping[str, str]) -> str:
    shown = [f"{name}: {fault}" for name, fault in faults.items()]
    more = f"; and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return (
        f"rank {rank}: engines cannot give back {len(shown)} parameters exactly; keep their memory "
        f"or a copy: {'; '.join(shown[:MAX_SHOWN])}{more}"
    )
