"""A job's configuration for fewer ranks, a smaller model and two short steps. Pure.

Algorithm, roles, precision, recomputation and everything else that decides which code runs stays as
configured; sizes, lengths, steps and waiting times become small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.check import ENGINE_RESERVED_TOKENS
from rlhf.config.schema import (
    BatchSection,
    Config,
    CriticSection,
    DataSection,
    MemorySection,
    OptimizerSection,
    RolloutSection,
    TrainSection,
)
from rlhf.dist.layout import sequence_multiple
from rlhf.planner.shrink_layout import Layouts
from rlhf.planner.shrink_model import Layers

STEPS = 2
ANSWER_TOKENS = 8
UPDATES = 2
LONGEST_WAIT_S = 300
WINDOW_MIB = 1
LEAST_KV_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rehearsal is, and what lies there."""

    run_dir: str
    model: str
    critic: str | None  # in place of a folder that the configuration names
    reward_model: str | None
    data: DataSection  # max_prompt_tokens: of the longest prompt that is used
    gpu: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something configured that the rehearsal does without, and why."""

    key: str
    value: str
    instead: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value} -> {self.instead}: {self.why}"


def dropped_keys(config: Config, gpu: bool) -> list[Dropped]:
    """What this machine, or any, cannot run yet."""
    out = []
    rollout = config.rollout
    if rollout.a2a != "none":
        out.append(Dropped("rollout.a2a", rollout.a2a, "none", "not supported yet"))
    if rollout.quantization != "none" and not gpu:
        why = "SGLang's matrix products with it are GPU kernels"
        out.append(Dropped("rollout.quantization", rollout.quantization, "none", why))
    if config.train.moe.dispatcher == "flex" and not gpu:
        out.append(Dropped("train.moe.dispatcher", "flex", "alltoall", "DeepEP needs GPUs"))
    for tracker in ("tensorboard", "swanlab", "wandb"):
        value = getattr(config.track, tracker)
        if value not in (False, "off"):
            out.append(Dropped(f"track.{tracker}", str(value), "off", "nothing to keep"))
    return out


def shrink_config(
    config: Config, full: Layouts, smaller: Layouts, layers: Layers, place: Place
) -> Config:
    """The configuration of the rehearsal; it passes the checks that any other has to pass."""
    batch = _batch(config.batch, smaller)
    updates = STEPS * batch.updates_per_step
    rests = 0 if config.critic is None else min(config.critic.warmup_steps, STEPS - 1)
    reward_model = config.reward_model
    sections: dict[str, Any] = {
        "run_dir": place.run_dir,
        "num_steps": STEPS,
        "model": _changed(config.model, path=place.model),
        "train": _train(config, smaller, layers, place),
        "rollout": _rollout(config, full, smaller, batch, place),
        "reshard": _changed(config.reshard, window_mib=WINDOW_MIB, verify_every=1),
        "memory": _memory(config.memory),
        "data": place.data,
        "algorithm": _algorithm(config),
        "batch": batch,
        "optimizer": _optimizer(config.optimizer, (STEPS - rests) * batch.updates_per_step),
        "critic": _critic(config.critic, place, updates),
        "reward_model": reward_model and _changed(reward_model, path=place.reward_model),
        "checkpoint": _changed(
            config.checkpoint, every=min(config.checkpoint.every, 1), resume="auto"
        ),
        "eval": _evaluation(config),
        "track": _changed(config.track, tensorboard=False, swanlab="off", wandb="off"),
        "dist": _changed(
            config.dist,
            ranks=smaller.train.world,
            timeout_s=min(config.dist.timeout_s, LONGEST_WAIT_S),
        ),
    }
    return config.model_copy(update=sections)


def _changed(section: Any, **values: Any) -> Any:
    return section.model_copy(update=values)


def _train(config: Config, smaller: Layouts, layers: Layers, place: Place) -> TrainSection:
    train, layout = config.train, smaller.train
    parallel = train.sequence_parallel and layout.tp > 1
    align = sequence_multiple(layout.tp, layout.cp, parallel)
    longest = place.data.max_prompt_tokens + _answer(config)
    configured = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    sequences = min(2, max(1, train.tokens_per_microbatch // configured))
    tokens = sequences * (-(-longest // align) * align)
    moe = train.moe
    if moe.dispatcher == "flex" and not place.gpu:
        moe = _changed(moe, dispatcher="alltoall")
    return TrainSection.model_copy(
        train,
        update={
            "tp": layout.tp,
            "pp": layout.pp,
            "vpp": layers.vpp,
            "first": layers.first,
            "last": layers.last,
            "cp": layout.cp,
            "ep": layout.ep,
            "etp": layout.etp,
            "sequence_parallel": parallel,
            "tokens_per_microbatch": tokens,
            "logprob_chunk_tokens": min(train.logprob_chunk_tokens, max(1, tokens // 4)),
            "moe": moe,
        },
    )


def _rollout(
    config: Config, full: Layouts, smaller: Layouts, batch: BatchSection, place: Place
) -> RolloutSection:
    rollout, layout = config.rollout, smaller.rollout
    context = place.data.max_prompt_tokens + _answer(config) + ENGINE_RESERVED_TOKENS
    share = _share(batch, smaller)
    running = share
    if rollout.max_running_requests < _share(config.batch, full):  # some wait for others
        running = max(layout.dp, share // 2)
    sampling = _changed(rollout.sampling, max_new_tokens=_answer(config))
    return RolloutSection.model_copy(
        rollout,
        update={
            "tp": layout.tp,
            "dp": layout.dp,
            "ep": layout.ep,
            "pp": layout.pp,
            "a2a": "none",
            "quantization": rollout.quantization if place.gpu else "none",
            "sampling": sampling,
            "max_running_requests": running,
            "kv_tokens": max(LEAST_KV_TOKENS, share * context),
            "start_timeout_s": min(rollout.start_timeout_s, LONGEST_WAIT_S),
            "timeout_s": min(rollout.timeout_s, LONGEST_WAIT_S),
        },
    )


def _share(batch: BatchSection, layouts: Layouts) -> int:
    """Answers of an engine in a step; each of its attention groups has as many prompts."""
    engines, dp = layouts.rollout.num_engines, layouts.rollout.dp
    prompts = -(-batch.prompts_per_step // engines)
    return -(-prompts // dp) * dp * batch.samples_per_prompt


def _answer(config: Config) -> int:
    return min(config.rollout.sampling.max_new_tokens, ANSWER_TOKENS)


def _batch(batch: BatchSection, smaller: Layouts) -> BatchSection:
    """Something for every engine, attention group and data-parallel rank in every update."""
    samples, updates = min(batch.samples_per_prompt, 2), min(batch.updates_per_step, UPDATES)
    prompts = max(2, smaller.rollout.num_engines * smaller.rollout.dp)
    while prompts * samples % (updates * smaller.train.dp):
        prompts += 1
    return BatchSection(
        prompts_per_step=prompts, samples_per_prompt=samples, updates_per_step=updates
    )


def _algorithm(config: Config) -> Any:
    """A random model earns nothing, and answers without a signal would be left out."""
    algorithm = config.algorithm
    values: dict[str, Any] = {}
    if algorithm.name == "grpo":
        values["skip_zero_signal"] = False
    if algorithm.fixed_length_tokens is not None:
        values["fixed_length_tokens"] = _answer(config)
    return _changed(algorithm, **values)


def _memory(memory: MemorySection) -> Any:
    """Buffers through which an optimizer state passes in several pieces."""
    values: dict[str, Any] = {}
    if memory.optimizer == "host":
        values["stream_mib"] = WINDOW_MIB
    return _changed(memory, **values)


def _critic(critic: CriticSection | None, place: Place, updates: int) -> CriticSection | None:
    if critic is None:
        return None
    return CriticSection.model_copy(
        critic,
        update={
            "path": place.critic,
            "optimizer": _optimizer(critic.optimizer, updates),
            "warmup_steps": min(critic.warmup_steps, STEPS - 1),
        },
    )


def _optimizer(optimizer: OptimizerSection, updates: int) -> OptimizerSection:
    return OptimizerSection.model_copy(
        optimizer, update={"warmup_steps": min(optimizer.warmup_steps, updates - 1)}
    )


def _evaluation(config: Config) -> Any:
    evaluation = config.eval
    tokens = evaluation.max_new_tokens
    return _changed(
        evaluation,
        every=min(evaluation.every, STEPS),
        max_new_tokens=None if tokens is None else min(tokens, _answer(config)),
    )
