"""What a pass over a micro-batch takes beside weights: an estimate from shapes. Pure.

It counts the tensors that a layer keeps for its backward pass, once each, without fusions, and
attention as a kernel that keeps no scores. Routed experts are taken to be evenly loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.weights.families import padded_vocab
from rlhf.weights.model_shape import ModelShape

HEAD_BLOCK_COLUMNS = 8192
"""Vocabulary columns whose logits exist at one time."""
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class PassBytes:
    """By global rank."""

    scoring: tuple[int, ...]  # forward only
    training: tuple[int, ...]
    head: tuple[int, ...]  # of log-probabilities


def pass_bytes(
    shape: ModelShape, layout: TrainLayout, model: ModelSection, train: TrainSection, itemsize: int
) -> PassBytes:
    """Of passes of ``train.tokens_per_microbatch`` tokens, ``rows = tokens / cp`` on a rank.

    - scoring: one layer's working set.
    - training: what the layers of the stage keep, for each micro-batch in flight on it (``pp`` on
      the first stage, one less on each behind; with virtual chunks ``(pp - 1) / vpp`` more), and
      twice a layer's working set, of values and gradients. With ``recompute: full`` a layer keeps
      its input only.
    - head, on the last stage: two chunks of logits and a block of the weight in float32, and the
      rows' hidden states and their gradient in the head's dtype.
    """
    rows = -(-train.tokens_per_microbatch // layout.cp)
    sharded = layout.tp if train.sequence_parallel else 1
    stream = rows * shape.hidden_size * itemsize // sharded  # hidden states of one place
    scoring, training = [], []
    for pp in range(layout.pp):
        numbers = [n for v in range(layout.vpp) for n in layout.layers(shape.num_layers, pp, v)]
        kept = [_layer(shape, layout, n, rows, sharded) * itemsize for n in numbers]
        in_flight = layout.pp - pp + (layout.pp - 1) / layout.vpp * (layout.vpp > 1)
        per_batch = stream * len(numbers) if train.recompute == "full" else sum(kept)
        scoring.append(max(kept))
        training.append(int(in_flight * per_batch) + 2 * max(kept))
    head = _head(shape, layout, model, train, rows, itemsize)
    stages = [layout.coord(rank).pp for rank in range(layout.world)]
    return PassBytes(
        scoring=tuple(scoring[pp] for pp in stages),
        training=tuple(training[pp] for pp in stages),
        head=tuple(head if pp == layout.pp - 1 else 0 for pp in stages),
    )


def _layer(shape: ModelShape, layout: TrainLayout, number: int, rows: int, sharded: int) -> int:
    """Elements that layer ``number`` keeps on a rank.

    ``rows * (4 hidden / sharded + attention / tp + MLP)``: two inputs and two normed inputs;
    queries, keys, values and the output of attention, keys and values of all cp ranks; gate, up and
    their product. A token's experts each have their own rows of them, and an input and an output.
    """
    tp = layout.tp
    out = 4 * rows * shape.hidden_size // sharded
    if shape.mla is not None:
        mla = shape.mla
        query = shape.num_heads * shape.head_dim
        value = shape.num_heads * mla.v_head_dim
        key_value = query + value
        out += rows * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim) // sharded
    else:
        query = value = shape.num_heads * shape.head_dim
        key_value = 2 * shape.num_kv_heads * shape.head_dim
    out += rows * (query + value + key_value * layout.cp) // tp
    if not shape.has_experts(number):
        return out + 3 * rows * shape.ffn_size // tp
    assert shape.moe is not None
    moe = shape.moe
    routed = moe.num_experts_per_token * rows // sharded
    out += routed * (2 * shape.hidden_size + 3 * moe.ffn_size)
    return out + 3 * rows * moe.num_shared_experts * moe.ffn_size // tp


def _head(
    shape: ModelShape,
    layout: TrainLayout,
    model: ModelSection,
    train: TrainSection,
    rows: int,
    itemsize: int,
) -> int:
    columns = min(HEAD_BLOCK_COLUMNS, padded_vocab(shape, layout.tp) // layout.tp)
    chunk = min(train.logprob_chunk_tokens, rows)
    width = FLOAT32_BYTES if model.fp32_head else itemsize
    logits = 2 * chunk * columns * FLOAT32_BYTES
    return logits + width * shape.hidden_size * (columns + 2 * rows)
