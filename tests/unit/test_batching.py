"""From a schedule to a batch: nothing lost, columns in place."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.batching import (
    BatchPlan,
    assemble,
    split_updates,
)
from rlhf.packing import Budget
from rlhf.types import Status, Trajectory


@given(n=st.integers(0, 50), k=st.integers(1, 7))
def test_updates_keep_order_and_lose_nothing(n, k):
    parts = split_updates(list(range(n)), k)
    assert [i for p in parts for i in p] == list(range(n))
    assert all(parts)
    assert len(parts) <= k


def _trajectory(i: int, prompt: int, answer: int) -> Trajectory:
    n = prompt + answer
    mask = np.arange(n) >= prompt
    return Trajectory(
        prompt_uid=f"p{i}",
        sample=0,
        tokens=np.arange(100 * i, 100 * i + n, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        status=Status.STOPPED,
    )


def test_assemble_keeps_tokens_masks_and_columns_of_each_sequence():
    trajectories = {i: _trajectory(i, 3, 2 + i) for i in range(4)}
    plan = BatchPlan(
        updates=([[[0, 2], [1]]], [[[3], []]]),
        loss_weight=dict.fromkeys(range(4), 0.25),
        credit={i: float(i) for i in range(4)},
    )
    batch = assemble(plan, 0, trajectories, Budget(64, align=4), torch.device("cpu"))
    assert [b - a for a, b in batch.micro_bounds] == [16, 8, 8, 4]
    for (begin, _), sequences in zip(batch.micro_bounds, batch.sequences, strict=True):
        for s in sequences:
            at = slice(begin + s.start, begin + s.start + s.length)
            t = trajectories[s.index]
            assert batch.tokens[at].tolist() == t.tokens.tolist()
            assert batch.mask[at].tolist() == t.loss_mask.tolist()
            assert batch.positions[at].tolist() == list(range(s.length))
            assert batch.credits[at].tolist() == (t.loss_mask * float(s.index)).tolist()
            fill = -s.length % 4
            padding = slice(at.stop, at.stop + fill)
            assert batch.positions[padding].tolist() == list(range(s.length, s.length + fill))
            assert not batch.mask[padding].any()
            assert not batch.loss_weights[padding].any()
    updates = list(batch.minibatches())
    assert [len(u.microbatches()) for u in updates] == [2, 2]
    assert updates[1].microbatches()[0].cu_seqlens.tolist() == [0, 8]
    assert updates[1].microbatches()[1].mask.sum() == 0
    assert updates[0].microbatches()[0].cu_seqlens.tolist() == [0, 8, 16]
    assert updates[1].microbatches()[1].cu_seqlens.tolist() == [0, 4]


def test_a_column_is_written_once():
    trajectories = {0: _trajectory(0, 2, 2)}
    plan = BatchPlan(updates=([[[0]]],), loss_weight={0: 1.0}, credit={0: 1.0})
    batch = assemble(plan, 0, trajectories, Budget(8), torch.device("cpu"))
    column = torch.zeros_like(batch.tokens, dtype=torch.float32)
    batch = batch.with_columns(old_logprobs=column, ref_logprobs=None)
    with pytest.raises(ValueError, match="written before"):
        batch.with_columns(old_logprobs=column)
    with pytest.raises(ValueError, match="unknown column"):
        batch.with_columns(old_logprob=column)
    with pytest.raises(ValueError, match="shape"):
        batch.with_columns(values=column[:1])


def test_nothing_to_train_is_an_empty_batch():
    batch = assemble(BatchPlan((), {}, {}), 0, {}, Budget(8), torch.device("cpu"))
    assert list(batch.minibatches()) == []
    assert batch.microbatches() == []
    assert batch.tokens.shape == (0,)
