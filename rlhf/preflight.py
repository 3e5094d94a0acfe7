"""Everything that can be known to be wrong before a process group exists."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf.config.check import check_config, rollout_layout, stage_faults, train_layout
from rlhf.config.check_experts import expert_faults
from rlhf.config.faults import ConfigError
from rlhf.config.schema import Config
from rlhf.dist.device import has_gpu
from rlhf.dist.layout import LayoutError, TrainLayout, node_faults
from rlhf.dist.world import World
from rlhf.saved import check_same_models
from rlhf.weights.config_keys import read_object
from rlhf.weights.families import check_train, full_shapes
from rlhf.weights.hf_checkpoint import check_index
from rlhf.weights.model_shape import ModelShape, load_model_shape
from rlhf.weights.value_model import load_value_model

ENGINE_KEYS: Mapping[str, Mapping[str, str | int]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
}
"""By family, what SGLang's class reads of a ``config.json`` without a default, and what we serve.
transformers 5 leaves these out when it saves a model."""


def check(config: Config, world: int, source: str) -> ModelShape:
    """The model's shape, after the configuration has been held against it and the world size.

    Raises:
        ValueError: all faults at once.
    """
    try:
        shape = load_model_shape(config.model.path)
    except ValueError as error:
        raise ConfigError([f"{source}:model.path: {error}"]) from None
    check_config(config, shape, world, source)
    check_quantization(config, has_gpu(), source)
    check_engine_keys(config.model.path, shape, source)
    check_index(config.model.path, full_shapes(shape))
    check_value_models(config, shape, train_layout(config.train, world), source)
    check_same_models(config, shape, source)
    return shape


def check_nodes(config: Config, world: World, source: str = "config") -> None:
    """Nodes are alike, hold ranks in order, and engines lie inside one or over whole ones.

    Raises:
        ConfigError: they do not.
    """
    ranks = world.local_size
    if world.size % ranks or world.rank % ranks != world.local_rank:
        raise ConfigError(
            [
                f"rank {world.rank} of {world.size} is number {world.local_rank} of {ranks} on its "
                "node: every node must have the same number of ranks, in order; start as many on "
                "each, and under srun with --distribution=block"
            ]
        )
    faults = node_faults(rollout_layout(config.rollout, world.size), ranks)
    if lines := [f"{source}:{fault}" for fault in faults]:
        raise ConfigError(lines)


def check_quantization(config: Config, gpu: bool, source: str = "config") -> None:
    """Engines on a CPU keep the model's dtype.

    Raises:
        ConfigError: block fp8 is asked for, and this machine has no GPU.
    """
    chosen = config.rollout.quantization
    if chosen != "none" and not gpu:
        raise ConfigError(
            [
                f"{source}:rollout.quantization: must be none on a machine without a GPU, is "
                f"{chosen}: SGLang has its matrix products with block fp8 as GPU kernels only"
            ]
        )


def check_engine_keys(folder: str, shape: ModelShape, source: str = "config") -> None:
    """SGLang's class reads keys that a config.json may leave out for training.

    Raises:
        ConfigError: one is missing; says what to write.
    """
    raw = read_object(Path(folder) / "config.json")
    needed = ENGINE_KEYS.get(shape.family, {})
    missing = [key for key in needed if raw.get(key) is None]
    if missing:
        words = ", ".join(f'"{key}": {json.dumps(needed[key])}' for key in missing)
        raise ConfigError(
            [
                f"{source}:model.path: {folder}/config.json: must have {', '.join(missing)}, which "
                f"SGLang's class of {shape.family} reads; add {words}"
            ]
        )


def notes(shape: ModelShape) -> list[str]:
    """What a user should know of the model although nothing is wrong with it."""
    if not shape.num_mtp_layers:
        return []
    return [
        f"num_nextn_predict_layers={shape.num_mtp_layers}: layers for multi-token prediction are "
        "neither trained, served nor exported"
    ]


def check_value_models(
    config: Config, actor: ModelShape, layout: TrainLayout, source: str = "config"
) -> None:
    """The folders of critic and reward model: complete, and usable beside the actor.

    Raises:
        ConfigError: one is not; names its key.
    """
    folders: list[tuple[str, str, bool]] = []
    if config.critic is not None and config.critic.path is not None:
        folders.append(("critic.path", config.critic.path, False))
    if config.reward_model is not None:
        folders.append(("reward_model.path", config.reward_model.path, True))
    faults = [
        f"{source}:{key}: {fault}"
        for key, folder, needs_head in folders
        for fault in _value_model_faults(config, actor, layout, folder, needs_head=needs_head)
    ]
    if faults:
        raise ConfigError(faults)


def _value_model_faults(
    config: Config, actor: ModelShape, layout: TrainLayout, folder: str, *, needs_head: bool
) -> Iterator[str]:
    try:
        shape = load_value_model(folder, needs_head=needs_head).shape
    except ValueError as error:
        yield str(error)
        return
    yield from value_shape_faults(config, actor, layout, folder, shape)


def value_shape_faults(
    config: Config, actor: ModelShape, layout: TrainLayout, model: str, shape: ModelShape
) -> Iterator[str]:
    """Why a critic or a reward model of this shape cannot stand beside the actor."""
    try:
        check_train(shape, layout)
        stages = list(stage_faults(layout, shape.num_layers))
    except LayoutError as error:
        yield from (f"{model}: {fault}" for fault in error.faults)
        return
    yield from (f"{model}: {fault}" for fault in stages)
    if shape.moe is not None or shape.mla is not None:
        yield from (f"{model}: {fault}" for fault in expert_faults(config.train, shape))
    if shape.vocab_size != actor.vocab_size:
        yield (
            f"{model} has a vocabulary of {shape.vocab_size}, the actor at model.path one of "
            f"{actor.vocab_size}: it sees the actor's token ids, so both need one tokenizer"
        )
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    if shape.max_position < longest:
        yield (
            f"{model} has {shape.max_position} positions, data.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens are {longest}; lower one of them"
        )


def check_data(config: Config) -> None:
    """Prompts, rewards and stop texts, read once before any rank is started.

    Raises:
        ValueError: a source is faulty, a reward cannot judge a prompt, a stop text is no token.
    """
    from rlhf.data.mix import build_eval_prompts, build_prompt_source
    from rlhf.data.tokenizer import load_tokenizer
    from rlhf.rewards.build import build_rewards

    tokenizer = load_tokenizer(config.model.path)
    for text in config.rollout.sampling.stop:
        tokenizer.stop_token(text)
    prompts = build_prompt_source(config.data, tokenizer, config.seed).prompts
    held_out = build_eval_prompts(config.data, tokenizer)
    build_rewards(config.data).check([*prompts, *held_out])


def check_loop(spec: str) -> None:
    """That there is such a file or module and that it has such a name; it is read, not run.

    A loop may import megatron, which only a rank can.

    Args:
        spec: ``file.py:function`` or ``package.module:function``.

    Raises:
        ValueError: there is none, or it is not Python.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"--loop {spec}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    file = Path(place) if place.endswith(".py") else _module_file(place)
    if file is None or not file.is_file():
        what = f"file {file.resolve()}" if file else f"module {place}"
        raise ValueError(f"--loop {spec}: no {what}")
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--loop {spec}: {file} is not Python: {error}") from None
    # of functions and classes, of imports, of variables; import * may bring any
    names = {getattr(node, key, None) for node in nodes for key in ("name", "asname", "id")}
    if not names & {name, "*"}:
        raise ValueError(f"--loop {spec}: {file} defines no function {name!r}")


def _module_file(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return None
    return Path(found.origin) if found and found.origin else None
