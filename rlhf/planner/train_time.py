"""Seconds of passes over micro-batches in training: stages of a pipeline, and what joins them.

All stages do the same number of micro-batches, so the slowest decides; the others' passes of one
micro-batch are the bubble, which virtual chunks divide (arXiv:2104.04473, section 2.2). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.config.schema import TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.planner.arithmetic import LayerWork, layer_counts, outer_params
from rlhf.planner.links import GIGA, Group, exchange_s, gather_s, reduce_s, send_s
from rlhf.planner.load import Load, PhaseTime
from rlhf.planner.speeds import Speeds
from rlhf.weights.model_shape import ModelShape

TERA = 1e12
GRADIENT_BYTES = 4
STATE_BYTES = 12
"""Of an element: float32 master and two moments."""
HEAD_PASSES = 4
"""Products of a head's blocks in training: forward, again in the backward pass, and two there."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a pass on a rank."""

    compute: float = 0.0
    communication: float = 0.0
    overhead: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.compute + other.compute,
            self.communication + other.communication,
            self.overhead + other.overhead,
        )

    def times(self, factor: float) -> Cost:
        return Cost(self.compute * factor, self.communication * factor, self.overhead * factor)

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.overhead


@dataclass(frozen=True, slots=True)
class Trained:
    """A model in Megatron, as its passes see it."""

    shape: ModelShape
    layout: TrainLayout
    train: TrainSection
    itemsize: int
    fp32_head: bool
    head: bool  # over the vocabulary; a value head costs nothing
    on_host: bool  # the optimizer state
    gpus_per_node: int

    def group(self, size: int, stride: int) -> Group:
        return Group(size, stride, self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Stage:
    """One micro-batch on a pipeline stage."""

    forward: Cost
    backward: Cost  # without what is computed again
    again: Cost
    params: float  # of a rank, dense
    expert_params: float

    @property
    def seconds(self) -> float:
        """Of training."""
        return self.forward.seconds + self.backward.seconds + self.again.seconds


def num_microbatches(load: Load, layout: TrainLayout) -> int:
    """Of a replica in one update.

    Sequences do not fill a micro-batch to its end: half a sequence is left out in the mean. With
    virtual chunks Megatron wants a multiple of the stages.
    """
    tokens = load.tokens / layout.dp / load.updates
    fill = max(0.5, 1 - load.sequence_tokens / (2 * load.microbatch_tokens))
    sequences = max(1, load.answers // (layout.dp * load.updates))
    number = min(sequences, max(1, math.ceil(tokens / (load.microbatch_tokens * fill))))
    return -(-number // layout.pp) * layout.pp if layout.vpp > 1 else number


def scoring_time(held: Trained, load: Load, speeds: Speeds) -> PhaseTime:
    """A forward pass over all tokens of a step.

    ``n * slowest stage + (the other stages) / vpp``.
    """
    number = num_microbatches(load, held.layout) * load.updates
    costs = [stage.forward for stage in stages(held, load, speeds)]
    slow = max(costs, key=lambda cost: cost.seconds)
    bubble = (sum(cost.seconds for cost in costs) - slow.seconds) / held.layout.vpp
    return PhaseTime(
        {
            "compute": number * slow.compute,
            "communication": number * slow.communication,
            "overhead": number * slow.overhead + speeds.score_s,
            "bubble": bubble,
        }
    )


def update_time(held: Trained, load: Load, speeds: Speeds) -> PhaseTime:
    """All updates of a step: passes, gradients over replicas, optimizer.

    Of the reduction of gradients, and the gathering of parameters after it, that part shows which
    takes longer than a backward, or forward, pass of one micro-batch beside it.
    """
    number, updates = num_microbatches(load, held.layout), load.updates
    costs = stages(held, load, speeds)
    slow = max(costs, key=lambda stage: stage.seconds)
    passes = slow.forward + slow.backward
    bubble = (sum(stage.seconds for stage in costs) - slow.seconds) / held.layout.vpp
    reduce, gather = _replicas_s(held, costs, speeds)
    if held.train.overlap:
        reduce = max(0.0, reduce - slow.backward.seconds - slow.again.seconds)
        gather = max(0.0, gather - slow.forward.seconds)
    parts = {
        "compute": number * passes.compute,
        "recompute": number * slow.again.seconds,
        "communication": number * passes.communication,
        "overhead": number * passes.overhead + speeds.update_s,
        "bubble": bubble,
        "gradients": reduce + gather,
        "optimizer": _optimizer_s(held, costs, speeds),
    }
    return PhaseTime({name: updates * seconds for name, seconds in parts.items()})


def stages(held: Trained, load: Load, speeds: Speeds) -> list[Stage]:
    """By number of the stage."""
    layout, shape = held.layout, held.shape
    number = num_microbatches(load, layout)
    rows = load.tokens / layout.dp / load.updates / number / layout.cp
    answers = rows * load.answer_tokens / load.sequence_tokens
    kinds: dict[LayerWork, tuple[Cost, Cost]] = {}
    out = []
    for pp in range(layout.pp):
        forward, again = Cost(overhead=speeds.microbatch_s), Cost()
        params = experts = 0.0
        chunks = [layout.layers(shape.num_layers, pp, v) for v in range(layout.vpp)]
        for work, count in layer_counts(shape, chunks):
            if work not in kinds:
                whole = layer_forward(held, work, rows, load.seen_tokens, speeds)
                attention = _attention_s(held, work, rows, load.seen_tokens, speeds)
                kinds[work] = whole, Cost(compute=attention)
            whole, attention_only = kinds[work]
            repeated = {"full": whole, "selective": attention_only}
            forward += whole.times(count)
            again += repeated.get(held.train.recompute, Cost()).times(count)
            params += count * work.dense_params / layout.tp
            shared = layout.ep * layout.expert_tp
            experts += count * work.num_experts * work.expert_params / shared
        inner = Stage(forward, Cost(), again, params, experts)
        out.append(_with_ends(held, pp, rows, answers, inner, speeds))
    return out


def _with_ends(
    held: Trained, pp: int, rows: float, answers: float, stage: Stage, speeds: Speeds
) -> Stage:
    """With embedding, head over the ``answers`` among the rows, and what goes to the next stage and
    back."""
    layout, shape, chunks = held.layout, held.shape, held.layout.vpp
    sharded = layout.tp if held.train.sequence_parallel else 1
    line = held.group(layout.pp, layout.world // layout.pp)
    sent = send_s(line, rows * shape.hidden_size * held.itemsize / sharded, speeds) * chunks
    forward = stage.forward + Cost(communication=sent)
    backward = Cost(2 * forward.compute, forward.communication, 2 * forward.overhead)
    params, last = stage.params, pp == layout.pp - 1
    if pp == 0:
        params += outer_params(shape) / layout.tp
    if last and held.head:
        if not (pp == 0 and shape.tied_embeddings):
            params += outer_params(shape) / layout.tp
        head = _head_s(held, answers, speeds)
        forward += Cost(compute=head)
        backward += Cost(compute=(HEAD_PASSES - 1) * head)
    return Stage(forward, backward, stage.again, params, stage.expert_params)


def layer_forward(held: Trained, work: LayerWork, rows: float, seen: float, speeds: Speeds) -> Cost:
    """A layer's forward pass over ``rows`` tokens of a rank (all of its tensor parallel group's).

    Products of experts take as long as reading their weights at least. ``seen``: tokens of a
    token's sequence, of which it sees half.
    """
    layout = held.layout
    dense = rows * work.dense_flops / layout.tp / _flops(held, speeds.train_matmul, speeds)
    routed = rows / layout.tp * work.routed_flops * speeds.expert_imbalance
    routed /= _flops(held, speeds.expert_matmul, speeds)
    weights = work.num_experts * work.expert_params / (layout.ep * layout.expert_tp)
    routed = max(routed, weights * held.itemsize / (speeds.hbm_gbs * GIGA))
    return Cost(
        compute=dense + routed + _attention_s(held, work, rows, seen, speeds),
        communication=_layer_communication_s(held, work, rows, speeds),
        overhead=speeds.layer_s + (speeds.expert_layer_s if work.has_experts else 0.0),
    )


def _attention_s(held: Trained, work: LayerWork, rows: float, seen: float, speeds: Speeds) -> float:
    flops = rows * seen / 2 * work.context_flops / held.layout.tp
    return flops / _flops(held, speeds.attention, speeds)


def _head_s(held: Trained, rows: float, speeds: Speeds) -> float:
    flops = 2 * rows * outer_params(held.shape) / held.layout.tp
    speed = speeds.peak_tflops * TERA * speeds.train_matmul
    return flops / (speed * (speeds.float32_ratio if held.fp32_head else 1.0))


def _flops(held: Trained, share: float, speeds: Speeds) -> float:
    """Per second, of the model's dtype."""
    ratio = speeds.float32_ratio if held.itemsize == 4 else 1.0
    return speeds.peak_tflops * TERA * share * ratio


def _layer_communication_s(held: Trained, work: LayerWork, rows: float, speeds: Speeds) -> float:
    """Tensor parallel sums around attention and each dense MLP; keys and values of all context
    parallel ranks; tokens to their experts and back."""
    layout, shape, width = held.layout, held.shape, held.itemsize
    stream = rows * shape.hidden_size * width
    regions = 2 if not work.has_experts or (shape.moe and shape.moe.num_shared_experts) else 1
    out = regions * reduce_s(held.group(layout.tp, 1), stream, speeds)
    heads = 2 * shape.num_kv_heads * shape.head_dim if shape.mla is None else 0
    if shape.mla is not None:
        heads = shape.num_heads * (shape.head_dim + shape.mla.v_head_dim)
    key_value = rows * layout.cp * heads * width / layout.tp
    out += gather_s(held.group(layout.cp, layout.tp), key_value, speeds)
    if work.has_experts:
        out += 2 * _dispatch_s(held, work, stream / layout.tp, speeds)
    return out


def _dispatch_s(held: Trained, work: LayerWork, stream: float, speeds: Speeds) -> float:
    """To the ranks of a token's experts, or back; ``stream``: bytes of a rank's own tokens.

    alltoall sends a copy for each expert; flex (DeepEP) one for each node that has some of them;
    allgather all tokens to all ranks.
    """
    layout, copies = held.layout, work.experts_per_token
    ranks = held.group(layout.ep, layout.expert_tp)
    if held.train.moe.dispatcher == "allgather":
        whole = held.group(layout.ep * layout.expert_tp, 1)
        return gather_s(whole, stream * whole.size, speeds)
    sliced = gather_s(held.group(layout.expert_tp, 1), stream * copies * layout.expert_tp, speeds)
    if held.train.moe.dispatcher == "flex" and ranks.nodes > 1:
        nodes = ranks.nodes * (1 - (1 - 1 / ranks.nodes) ** copies)
        return exchange_s(ranks, stream * nodes, speeds) + sliced
    return exchange_s(ranks, stream * copies, speeds) + sliced


def _replicas_s(held: Trained, costs: Sequence[Stage], speeds: Speeds) -> tuple[float, float]:
    """Seconds in which gradients are reduced to shares, and parameters gathered from them."""
    layout = held.layout
    dense = held.group(layout.dp * layout.cp, layout.tp)
    experts = held.group(layout.edp, layout.expert_tp * layout.ep)
    params = max(stage.params for stage in costs)
    expert_params = max(stage.expert_params for stage in costs)

    def both(width: int) -> float:
        return gather_s(dense, params * width, speeds) + gather_s(
            experts, expert_params * width, speeds
        )

    return both(GRADIENT_BYTES), both(held.itemsize)


def _optimizer_s(held: Trained, costs: Sequence[Stage], speeds: Speeds) -> float:
    """Reads and writes each state of the rank's share, in device memory; or over PCIe, both ways at
    once, where it is on the host."""
    layout = held.layout
    owned = max(
        stage.params / (layout.dp * layout.cp) + stage.expert_params / layout.edp for stage in costs
    )
    moved = owned * (2 * STATE_BYTES + GRADIENT_BYTES + held.itemsize)
    seconds = moved / (speeds.hbm_gbs * GIGA * speeds.decode_bandwidth)
    if held.on_host:
        seconds = max(seconds, owned * STATE_BYTES / (speeds.pcie_gbs * GIGA))
    return seconds
