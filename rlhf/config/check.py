"""What must hold between sections, with the model and the number of ranks. No process group.

Every rule adds a ``key.path: what must hold, both numbers, what to do`` line; all are reported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.check_algorithm import algorithm_faults, optimizer_faults
from rlhf.config.check_experts import expert_faults
from rlhf.config.faults import ConfigError
from rlhf.config.schema import (
    Config,
    JsonlSource,
    MemorySection,
    ReasoningGymSource,
    RolloutSection,
    SamplingSection,
    TrainSection,
)
from rlhf.dist.layout import (
    LayoutError,
    RolloutLayout,
    TrainLayout,
    listed,
    sequence_multiple,
)
from rlhf.weights.families import (
    engine_block_faults,
    rollout_faults,
    train_block_faults,
    train_faults,
)

if TYPE_CHECKING:
    from rlhf.weights.model_shape import ModelShape

ENGINE_RESERVED_TOKENS = 8
"""Of a context, that the engine keeps for itself."""
LARGEST_RANK_BYTES = 2**40
"""More than any device holds."""


def check_config(config: Config, shape: ModelShape, world: int, source: str = "config") -> None:
    """Refuse impossible combinations; pure but for looking at paths.

    Args:
        config: already valid key by key.
        shape: the model at ``model.path``.
        world: number of ranks.
        source: names the configuration in messages.

    Raises:
        ConfigError: all faults.
    """
    rules: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _unsupported_faults(config.rollout),
        lambda: _stream_faults(config.memory),
        lambda: _data_faults(config),
        lambda: _path_faults(config),
    )
    here = [f"{source}:{fault}" for rule in rules for fault in rule()]
    if faults := [*job_faults(config, shape, world, source), *here]:
        raise ConfigError(faults)


def job_faults(config: Config, shape: ModelShape, world: int, source: str = "config") -> list[str]:
    """What is wrong with a job wherever it runs, and whatever is built; arguments as of
    :func:`check_config`."""
    rules: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _layout_faults(config, shape, world),
        lambda: _route_faults(config.rollout, shape),
        lambda: expert_faults(config.train, shape),
        lambda: _batch_section_faults(config, world),
        lambda: algorithm_faults(config),
        lambda: sampling_faults(config.rollout.sampling),
        lambda: _length_faults(config, shape),
        lambda: _engine_faults(config, world),
        lambda: _memory_faults(config, shape),
        lambda: optimizer_faults(config),
    )
    return [f"{source}:{fault}" for rule in rules for fault in rule()]


def _layout_faults(config: Config, shape: ModelShape, world: int) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    if train.sequence_parallel and train.tp == 1:
        yield (
            "train.sequence_parallel: needs train.tp > 1, which is 1; turn it off or raise train.tp"
        )
    if train.vpp > 1 and train.pp == 1:
        yield f"train.vpp: {train.vpp} chunks need train.pp > 1, which is 1; set vpp to 1"
    for key in ("first", "last"):
        if getattr(train, key) is not None and train.pp == 1:
            yield f"train.{key}: needs train.pp > 1, which is 1; leave it out"
    try:
        layout = train_layout(train, world)
        faults = [*train_faults(shape, layout), *stage_faults(layout, shape.num_layers)]
    except LayoutError as error:
        faults = error.faults
    try:
        engines = rollout_layout(rollout, world)
        faults += rollout_faults(shape, engines)
    except LayoutError as error:
        faults += error.faults
    if not faults:  # else the cuts are those of no layout
        faults += engine_block_faults(shape, engines)
        faults += train_block_faults(shape, layout, engines)
    yield from faults


def stage_faults(layout: TrainLayout, layers: int) -> Iterator[str]:
    """Megatron wants as many layers on each stage, but for the first and the last one."""
    chunks = layout.pp * layout.vpp
    if chunks > layers:
        yield (
            f"train.pp: pp*vpp={chunks} must be at most the model's {layers} layers; lower pp or "
            "vpp"
        )
        return
    ends = [n for n in (layout.first, layout.last) if n is not None]
    left, stages = layers - sum(ends), layout.pp - len(ends)
    if stages > 0 and left > 0 and left % stages:
        before = layout.first or 0
        middle = layout.pp - 1 - (layout.first is not None)
        fitting = [n for n in range(1, layers - before) if (layers - before - n) % middle == 0]
        yield (
            f"train.first, train.last: {left} of the model's {layers} layers are left for {stages} "
            f"stages, with first={layout.first} and last={layout.last}, and must be a multiple of "
            f"{stages}; "
            + (
                f"with this first, last may be one of {listed(fitting)}"
                if fitting
                else "give another train.first"
            )
        )
        return
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            layout.layers(layers, stage, chunk)


def train_layout(train: TrainSection, world: int) -> TrainLayout:
    """The training grid of a configuration.

    Raises:
        LayoutError: the ranks cannot form it.
    """
    return TrainLayout(
        world, train.tp, train.pp, train.vpp, train.cp, train.ep, train.etp, train.first, train.last
    )


def rollout_layout(rollout: RolloutSection, world: int) -> RolloutLayout:
    """The engines of a configuration.

    Raises:
        LayoutError: the ranks cannot form them.
    """
    return RolloutLayout(
        world,
        rollout.tp,
        rollout.dp,
        rollout.ep,
        rollout.pp,
        rollout.a2a,
        rollout.quantization,
    )


def _unsupported_faults(rollout: RolloutSection) -> Iterator[str]:
    if rollout.a2a != "none":
        yield (
            f"rollout.a2a: must be none, is {rollout.a2a}: all-to-all dispatch in the engine is "
            "not supported yet"
        )


def _route_faults(rollout: RolloutSection, shape: ModelShape) -> Iterator[str]:
    if rollout.routes and shape.moe is None:
        yield f"rollout.routes: must be false: {shape.family} has no routed experts"
    if rollout.routes and rollout.pp > 1:
        yield (
            f"rollout.routes: needs rollout.pp=1, is {rollout.pp}: a stage knows the routes of its "
            "own layers only; use rollout.tp and rollout.ep"
        )


def _stream_faults(memory: MemorySection) -> Iterator[str]:
    usual_mib = MemorySection.model_fields["stream_mib"].default
    if memory.optimizer == "device" and memory.stream_mib != usual_mib:
        yield (
            f"memory.stream_mib: {memory.stream_mib} has no effect while memory.optimizer is "
            "device; leave it out, or set memory.optimizer to host"
        )


def batch_faults(prompts: int, samples: int, updates: int, dp: int) -> Iterator[str]:
    """Each update trains the same number of responses, the same on every DP rank."""
    responses = prompts * samples
    made = f"prompts_per_step*samples_per_prompt={prompts}*{samples}={responses}"
    if responses % updates:
        yield (
            f"batch.updates_per_step: {updates} must divide {made}; set it to 1 or another divisor"
        )
    elif responses // updates % dp:
        yield (
            f"batch.prompts_per_step: {made} over updates_per_step={updates} gives "
            f"{responses // updates} responses per update, which must be a multiple of the "
            f"{dp} data-parallel ranks; change the batch, or train.tp, train.pp and train.cp"
        )


def _batch_section_faults(config: Config, world: int) -> Iterator[str]:
    batch = config.batch
    try:
        dp = train_layout(config.train, world).dp
    except LayoutError:
        dp = 1  # the layout's own fault is reported
    yield from batch_faults(
        batch.prompts_per_step, batch.samples_per_prompt, batch.updates_per_step, dp
    )


def sampling_faults(sampling: SamplingSection) -> Iterator[str]:
    """Trainer and engine must give a token the same probability: that of the full distribution."""
    if sampling.temperature == 0:
        yield (
            "rollout.sampling.temperature: must be above 0 in training, is 0: all answers to a "
            "prompt would be equal; evaluation is greedy anyway"
        )
    truncated = "the engine would sample from fewer tokens than the trainer gives probability to"
    if sampling.top_p < 1:
        yield f"rollout.sampling.top_p: must be 1 in training, is {sampling.top_p}: {truncated}"
    if sampling.top_k < 1 and sampling.top_k != -1:
        yield f"rollout.sampling.top_k: must be -1 (all tokens), is {sampling.top_k}"
    elif sampling.top_k != -1:
        yield f"rollout.sampling.top_k: must be -1 in training, is {sampling.top_k}: {truncated}"


def _length_faults(config: Config, shape: ModelShape) -> Iterator[str]:
    prompt = config.data.max_prompt_tokens
    answers = {"rollout.sampling.max_new_tokens": config.rollout.sampling.max_new_tokens}
    if config.eval.max_new_tokens is not None:
        answers["eval.max_new_tokens"] = config.eval.max_new_tokens
    for key, answer in answers.items():
        need = prompt + answer + ENGINE_RESERVED_TOKENS
        total = (
            f"data.max_prompt_tokens + {key} + {ENGINE_RESERVED_TOKENS} that the engine reserves = "
            f"{prompt} + {answer} + {ENGINE_RESERVED_TOKENS} = {need}"
        )
        if need > shape.max_position:
            yield (
                f"{key}: {total} must be at most the model's {shape.max_position} positions; "
                "lower one of them"
            )
        kv = config.rollout.kv_tokens
        if kv is not None and need > kv:
            yield f"rollout.kv_tokens: {kv} must be at least {total}; raise it or lower one of them"
    longest = prompt + config.rollout.sampling.max_new_tokens
    train = config.train
    align = sequence_multiple(train.tp, train.cp, train.sequence_parallel)
    rounded = -(-longest // align) * align
    if rounded > train.tokens_per_microbatch:
        padded = f", padded to {rounded}, a multiple of {align}" if rounded > longest else ""
        yield (
            f"train.tokens_per_microbatch: {train.tokens_per_microbatch} must hold the "
            f"longest sequence, data.max_prompt_tokens + rollout.sampling.max_new_tokens = "
            f"{longest}{padded}; raise it or lower one of them"
        )


def _engine_faults(config: Config, world: int) -> Iterator[str]:
    rollout, batch = config.rollout, config.batch
    engines = max(1, world // (rollout.tp * rollout.pp))
    prompts = -(-batch.prompts_per_step // engines)
    prompts = -(-prompts // rollout.dp) * rollout.dp  # a DP-attention group runs its part of them
    share = prompts * batch.samples_per_prompt
    if rollout.deterministic and rollout.max_running_requests < share:
        yield (
            f"rollout.max_running_requests: {rollout.max_running_requests} must be at least {share}"
            f" (answers of one engine in a step: batch.prompts_per_step={batch.prompts_per_step} "
            f"over {engines} engines, batch.samples_per_prompt={batch.samples_per_prompt}) while "
            "rollout.deterministic is true; raise it, or set deterministic to false"
        )


def _memory_faults(config: Config, shape: ModelShape) -> Iterator[str]:
    """Numbers with digits too many. This machine need not be the one that runs the job."""
    limit = f"must be less than {LARGEST_RANK_BYTES / 2**30:.0f} GiB on any rank"
    windows = 2 * config.reshard.window_mib * 2**20
    if windows > LARGEST_RANK_BYTES:
        yield (
            f"reshard.window_mib: two windows of {config.reshard.window_mib} MiB, "
            f"{windows / 2**30:.0f} GiB, {limit}; lower it, e.g. to 64"
        )
    kv = config.rollout.kv_tokens
    if kv is None or shape.mla is not None:
        return
    heads = max(1, shape.num_kv_heads // config.rollout.tp)
    itemsize = 4 if config.model.dtype == "float32" else 2
    cache = kv * shape.num_layers * heads * shape.head_dim * 2 * itemsize
    if cache > LARGEST_RANK_BYTES:
        yield (
            f"rollout.kv_tokens: the KV cache of {kv} tokens, {cache / 2**30:.0f} GiB, {limit}; "
            "lower it"
        )


def _data_faults(config: Config) -> Iterator[str]:
    data = config.data
    for key, sources in (("train", data.train), ("eval", data.eval)):
        names = [s.name for s in sources]
        for i, source in enumerate(sources):
            here = f"data.{key}.{i}"
            if names.index(source.name) != i:
                yield f"{here}.name: {source.name!r} must be unique within data.{key}"
            if isinstance(source, JsonlSource) and not os.path.isfile(source.path):
                yield f"{here}.path: no such file: {source.path}"
            if isinstance(source, ReasoningGymSource):
                yield from _held_out_faults(here, source, config)
    if config.eval.every and not data.eval:
        yield f"eval.every: {config.eval.every} needs data.eval, which is empty; add a source"
    if data.drop_last and len(data.train) > 1:
        yield (
            f"data.drop_last: needs a single source in data.train, which has {len(data.train)}; "
            "set it to false"
        )


def _held_out_faults(here: str, source: ReasoningGymSource, config: Config) -> Iterator[str]:
    if source.held_out >= source.size:
        yield f"{here}.held_out: {source.held_out} must be below size={source.size}"
    if source.split == "train":
        return
    if source.held_out == 0:
        yield f"{here}.held_out: must be above 0 while split is held_out, is 0"
    if here.startswith("data.train"):
        yield f"{here}.split: must be train here, is held_out: these items are kept from training"
        return
    for i, other in enumerate(config.data.train):
        if not isinstance(other, ReasoningGymSource) or other.task != source.task:
            continue
        for key in ("params", "size", "seed", "held_out"):
            mine, theirs = getattr(source, key), getattr(other, key)
            if mine != theirs:
                yield (
                    f"{here}.{key}: {mine} must equal data.train.{i}.{key}={theirs}, "
                    "or training sees held-out items"
                )


def _path_faults(config: Config) -> Iterator[str]:
    run_dir = Path(config.run_dir).absolute()
    try:
        run_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        yield f"run_dir: {error}"
        return
    nearest = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    try:  # permissions do not tell: nothing can be made in /proc, not even by root
        tempfile.TemporaryDirectory(prefix=".rlhf-", dir=nearest).cleanup()
    except OSError as error:
        yield f"run_dir: {nearest} must be a folder that this user can write to: {error.strerror}"
