"""Operations on sequences that are cut over context-parallel ranks."""

from __future__ import annotations

import torch

from rlhf.algorithms.aggregate import token_weights, weighted_sum
from rlhf.dist.layout import sequence_multiple
from rlhf.mcore.context import cut, spread, zigzag_rows
from rlhf.packing import Budget
from rlhf.types import MicroBatch
from tests.cases.case import Case, Op, floats


def _padded(length: int, cp: int) -> int:
    return Budget(tokens=1024, align=sequence_multiple(1, cp, False)).rounded(length)


def cp_invariance(case: Case) -> Case:
    """The losses that each rank makes, joined as their all-reduce does it."""
    losses, cp = floats(case["token_losses"]), case["cp"]
    length = len(losses) + 1  # the first token of a sequence is not trained
    padded = _padded(length, cp)
    micro = MicroBatch(
        tokens=torch.zeros(padded, dtype=torch.long),
        positions=torch.arange(padded),
        mask=(torch.arange(padded) > 0) & (torch.arange(padded) < length),
        cu_seqlens=torch.tensor([0, padded], dtype=torch.int32),
        columns={},
    )
    made = [cut(micro, cp, rank, 0).made_here for rank in range(cp)]
    joined = torch.stack([spread(losses[here], here) for here in made]).sum(0)
    (weight,) = token_weights([sum(case["mask"])], "token-mean")
    weights = torch.tensor(case["mask"]).float() * weight
    return {"reported_loss": float(weighted_sum(joined, weights))}


def cp_zigzag(case: Case) -> Case:
    padded = _padded(case["length"], case["cp"])
    rows = [zigzag_rows([0, padded], case["cp"], rank) for rank in range(case["cp"])]
    return {
        "padded_length": padded,
        "indices_by_cp_rank": rows,
        "valid_tokens_by_cp_rank": [sum(i < case["length"] for i in own) for own in rows],
    }


OPS: dict[str, Op] = {"cp_invariance": cp_invariance, "cp_zigzag": cp_zigzag}
