"""Seconds of a rollout: prompts are read, answers decoded step by step, the longest one ends it.

Engines are alike, and so are the attention groups of each; a group decodes as many answers at a
time as its cache and ``rollout.max_running_requests`` allow. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf.dist.layout import RolloutLayout
from rlhf.planner.arithmetic import (
    LayerWork,
    decode_context_flops,
    layer_counts,
    outer_params,
)
from rlhf.planner.engine_memory import kv_token_bytes
from rlhf.planner.links import GIGA, Group, exchange_s, gather_s, reduce_s
from rlhf.planner.load import Load, PhaseTime
from rlhf.planner.speeds import Speeds
from rlhf.weights.model_shape import ModelShape

TERA = 1e12
PREFILL_TOKENS = 8192
"""Of prompts in one pass of an engine."""
POINTS = 32
"""At which the end of a rollout is added up."""
FP8_BYTES = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model in engines."""

    shape: ModelShape
    layout: RolloutLayout
    itemsize: int
    prefix_cache: bool
    kv_tokens: int  # of one attention group
    gpus_per_node: int

    @property
    def weight_bytes(self) -> float:
        """Of an element of a layer's matrices."""
        return FP8_BYTES if self.layout.quantization == "block_fp8" else float(self.itemsize)

    def group(self, size: int, stride: int = 1) -> Group:
        return Group(size, stride, self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decoding step by cause; a link, the memory and the arithmetic each wait for
    one another."""

    weights: float
    cache: float
    compute: float  # beyond the time in which weights and cache are read
    communication: float
    overhead: float

    @property
    def seconds(self) -> float:
        return self.weights + self.cache + self.compute + self.communication + self.overhead


def rollout_time(held: Served, load: Load, speeds: Speeds) -> PhaseTime:
    """All answers of a step.

    A group with more answers than it decodes at a time begins one when another ends, at constant
    batch; when none is left the batch dies away, ``batch * load.alive(t / longest)``. ``tail`` is
    what that end takes beyond its tokens at the full batch: the price of waiting for the longest.
    """
    layout = held.layout
    groups = layout.num_engines * layout.dp
    share = math.ceil(load.answers / groups)
    batch = running(held, load)
    full = step_cost(held, batch, _mean_context(load), speeds)
    waiting_steps = max(0.0, (share - batch) * load.answer_tokens / batch)
    end_s = _end_s(held, load, batch, speeds)
    steps = waiting_steps + load.answer_tokens  # at the full batch, for all tokens
    tail = max(0.0, end_s - load.answer_tokens * full.seconds)
    return PhaseTime(
        {
            "prefill": prefill_s(held, load, speeds),
            "weights": steps * full.weights,
            "cache": steps * full.cache,
            "compute": steps * full.compute,
            "communication": steps * full.communication,
            "overhead": steps * full.overhead + speeds.rollout_s,
            "tail": tail,
            "reward": speeds.answer_reward_s,
        }
    )


def running(held: Served, load: Load) -> float:
    """Answers that an attention group decodes at a time."""
    layout = held.layout
    share = math.ceil(load.answers / (layout.num_engines * layout.dp))
    room = held.kv_tokens / (load.prompt_tokens + load.answer_tokens)
    return max(1.0, min(share, load.concurrency / layout.dp, room))


def _mean_context(load: Load) -> float:
    """Tokens that a decoding step sees of an answer, in the mean over its tokens."""
    k = load.longest_answer_tokens / load.answer_tokens - 1
    return load.prompt_tokens + load.longest_answer_tokens / (k + 2)


def _end_s(held: Served, load: Load, batch: float, speeds: Speeds) -> float:
    """From the moment when no answer waits any more: the midpoint rule over the longest answer."""
    total = 0.0
    for point in range(POINTS):
        at = (point + 0.5) / POINTS
        alive = max(1.0, batch * load.alive(at))
        context = load.prompt_tokens + at * load.longest_answer_tokens
        total += step_cost(held, alive, context, speeds).seconds
    return total * load.longest_answer_tokens / POINTS


def step_cost(held: Served, batch: float, context: float, speeds: Speeds) -> StepCost:
    """One token of each of ``batch`` sequences of every attention group of an engine.

    A stage of a pipeline has ``batch / pp`` of them at a time, and a token passes all stages.

    - weights: of attention and dense MLPs all, of the experts those that a token takes:
      ``1 - (1 - k / E) ** tokens`` of them.
    - cache: ``batch * context`` tokens.
    - compute: the arithmetic of both, where it takes longer.
    """
    layout, shape = held.layout, held.shape
    at_a_time = max(1.0, batch / layout.pp)
    memory = speeds.hbm_gbs * GIGA * speeds.decode_bandwidth
    ratio = speeds.float32_ratio if held.itemsize == 4 else 1.0
    arithmetic = speeds.peak_tflops * TERA * speeds.prefill_matmul * ratio
    head = outer_params(shape) / layout.attention_tp
    loaded = head * held.itemsize
    flops = 2 * at_a_time * head
    communication = overhead = 0.0
    for work, count in layer_counts(shape, [range(shape.num_layers)]):
        loaded += count * _touched_params(held, work, at_a_time) * held.weight_bytes
        flops += count * _rank_flops(held, work, at_a_time)
        communication += count * _layer_communication_s(held, work, at_a_time, speeds)
        kind = speeds.decode_expert_layer_s if work.has_experts else 0.0
        overhead += count * (speeds.decode_layer_s + kind)
    weights_s = loaded / memory
    cache_s = at_a_time * context * _cache_bytes(held) / memory
    seen = at_a_time * context * decode_context_flops(shape) * shape.num_layers
    attention_s = seen / layout.attention_tp / arithmetic
    compute_s = max(0.0, flops / arithmetic - weights_s) + max(0.0, attention_s - cache_s)
    return StepCost(weights_s, cache_s, compute_s, communication, overhead + speeds.decode_step_s)


def prefill_s(held: Served, load: Load, speeds: Speeds) -> float:
    """All prompts, once each with a prefix cache, else for each answer; experts evenly loaded."""
    layout, shape = held.layout, held.shape
    times = 1 if held.prefix_cache else load.samples
    tokens = load.prompts / layout.num_engines * times * load.prompt_tokens
    ratio = speeds.float32_ratio if held.itemsize == 4 else 1.0
    arithmetic = speeds.peak_tflops * TERA * speeds.prefill_matmul * ratio
    rows = tokens / layout.dp
    compute = communication = 0.0
    for work, count in layer_counts(shape, [range(shape.num_layers)]):
        seen = load.prompt_tokens / 2 * work.context_flops / layout.attention_tp
        compute += count * (_rank_flops(held, work, rows) + rows * seen)
        latency = _layer_communication_s(held, work, 0.0, speeds)
        communication += count * (_layer_communication_s(held, work, rows, speeds) - latency)
    passes = max(1.0, tokens / PREFILL_TOKENS)
    overhead = passes * (speeds.prefill_pass_s + shape.num_layers * speeds.layer_s)
    return compute / arithmetic + communication + overhead


def _mlp_tp(held: Served) -> int:
    """Ranks over which dense MLPs and shared experts are cut: with DP-attention and experts none,
    see :class:`rlhf.dist.layout.RolloutLayout`."""
    layout = held.layout
    return 1 if layout.dp > 1 and held.shape.moe is not None else layout.tp


def _touched_params(held: Served, work: LayerWork, batch: float) -> float:
    """Of a rank, read in a step. ``batch``: of one attention group."""
    layout = held.layout
    dense = work.attention_params / layout.attention_tp + work.mlp_params / _mlp_tp(held)
    if not work.has_experts:
        return dense
    tokens = batch * layout.dp
    share = 1 - (1 - work.experts_per_token / work.num_experts) ** tokens
    return dense + share * work.num_experts * work.expert_params / layout.tp


def engine_params(held: Served) -> float:
    """Of the matrices of all layers on a rank; of its own stage and as many more, with pp."""
    layout, shape = held.layout, held.shape
    return sum(
        count
        * (
            work.attention_params / layout.attention_tp
            + work.mlp_params / _mlp_tp(held)
            + work.num_experts * work.expert_params / layout.tp
        )
        for work, count in layer_counts(shape, [range(shape.num_layers)])
    )


def _rank_flops(held: Served, work: LayerWork, rows: float) -> float:
    """Of a layer for ``rows`` tokens of every attention group, attention's own products apart."""
    layout = held.layout
    cut = _mlp_tp(held)
    mlp_rows = rows if cut == 1 and layout.dp > 1 else rows * layout.dp
    dense = rows * work.attention_params / layout.attention_tp + mlp_rows * work.mlp_params / cut
    return 2 * dense + rows * layout.dp * work.routed_flops / layout.tp


def _cache_bytes(held: Served) -> float:
    """Of a token in all layers, on a rank."""
    layout = held.layout
    whole = RolloutLayout(layout.tp, tp=layout.tp, dp=layout.dp)  # one stage
    return float(max(kv_token_bytes(held.shape, whole, held.itemsize)))


def _layer_communication_s(held: Served, work: LayerWork, rows: float, speeds: Speeds) -> float:
    """Sums over the attention group, and over the ranks that share the MLP or the experts.

    Experts with DP-attention see the tokens of all groups: gathered before and added up after, or
    with DeepEP sent to where their experts are and back.
    """
    layout = held.layout
    width = held.shape.hidden_size * held.itemsize
    out = reduce_s(held.group(layout.attention_tp), rows * width, speeds)
    if not work.has_experts:
        over = held.group(_mlp_tp(held))
        if layout.dp > 1 and over.size > 1:
            return out + 2 * gather_s(over, rows * layout.dp * width, speeds)
        return out + reduce_s(over, rows * width, speeds)
    if layout.a2a == "deepep":
        ranks = held.group(layout.ep)
        copies = work.experts_per_token
        nodes = ranks.nodes * (1 - (1 - 1 / ranks.nodes) ** copies) if ranks.nodes > 1 else copies
        own = rows / layout.attention_tp * width
        return out + 2 * exchange_s(ranks, own * nodes, speeds)
    whole = held.group(layout.tp)
    if layout.dp > 1:
        return out + 2 * gather_s(whole, rows * layout.dp * width, speeds)
    return out + reduce_s(whole, rows * width, speeds)
