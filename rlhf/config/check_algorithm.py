"""What must hold between the algorithm, its critic, its optimizers and the batch."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.config.schema import AlgorithmSection, Config, GAESection, OptimizerSection

ONLY_GRPO = ("normalize_by_std", "std_eps", "skip_zero_signal")


def algorithm_faults(config: Config) -> Iterator[str]:
    """A key that has no effect is refused, so that nobody believes in it."""
    yield from _common_faults(config.algorithm)
    if config.algorithm.name == "ppo":
        yield from _ppo_faults(config)
    else:
        yield from _grpo_faults(config)


def _grpo_faults(config: Config) -> Iterator[str]:
    name, samples = config.algorithm.name, config.batch.samples_per_prompt
    if samples < 2:
        yield (
            f"batch.samples_per_prompt: must be at least 2, is {samples}: "
            f"{name} compares the answers to one prompt with each other"
        )
    if config.critic is not None:
        yield (
            f"critic: has no effect while algorithm.name is {name}; leave it out, or set "
            "algorithm.name to ppo"
        )
    for key in GAESection.model_fields:
        yield from _without_effect("algorithm.gae", config.algorithm.gae, key, name)


def _ppo_faults(config: Config) -> Iterator[str]:
    for key in ONLY_GRPO:
        yield from _without_effect("algorithm", config.algorithm, key, "ppo")
    critic = config.critic
    if critic is None:
        yield (
            "critic: must be given while algorithm.name is ppo, at least "
            "critic: {optimizer: {lr: 1e-5}}"
        )
    elif critic.warmup_steps >= config.num_steps:
        yield (
            f"critic.warmup_steps: {critic.warmup_steps} must be below num_steps="
            f"{config.num_steps}, or the actor never learns"
        )


def _without_effect(
    place: str, section: AlgorithmSection | GAESection, key: str, name: str
) -> Iterator[str]:
    value = getattr(section, key)
    if value != type(section).model_fields[key].default:
        yield f"{place}.{key}: {value} has no effect while algorithm.name is {name}; leave it out"


def _common_faults(algorithm: AlgorithmSection) -> Iterator[str]:
    kl = algorithm.kl
    if kl.place == "off" and kl.coef is not None:
        yield (
            f"algorithm.kl.coef: {kl.coef} has no effect while algorithm.kl.place is off; "
            "leave it out, or set place to loss or reward"
        )
    if kl.place != "off" and kl.coef is None:
        yield (
            f"algorithm.kl.coef: must be given while algorithm.kl.place is {kl.place}, e.g. 0.001"
        )
    if algorithm.aggregation != "fixed-length" and algorithm.fixed_length_tokens is not None:
        yield (
            f"algorithm.fixed_length_tokens: {algorithm.fixed_length_tokens} has no effect while "
            f"algorithm.aggregation is {algorithm.aggregation}; leave it out, or set aggregation "
            "to fixed-length"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.clip_high:
        yield (
            f"algorithm.dual_clip: {algorithm.dual_clip} must be above 1 + clip_high = "
            f"{1 + algorithm.clip_high}, e.g. 3"
        )


def optimizer_faults(config: Config) -> Iterator[str]:
    """The actor's optimizer, which rests while the critic warms up, and the critic's."""
    per_step, critic = config.batch.updates_per_step, config.critic
    rests = critic.warmup_steps if critic is not None else 0
    if rests < config.num_steps:
        yield from _one_optimizer(
            "optimizer", config.optimizer, (config.num_steps - rests) * per_step
        )
    if critic is not None:
        yield from _one_optimizer("critic.optimizer", critic.optimizer, config.num_steps * per_step)


def _one_optimizer(key: str, optimizer: OptimizerSection, num_updates: int) -> Iterator[str]:
    if optimizer.min_lr > optimizer.lr:
        yield f"{key}.min_lr: {optimizer.min_lr} must be at most {key}.lr={optimizer.lr}"
    if optimizer.min_lr and optimizer.decay == "constant":
        yield (
            f"{key}.min_lr: {optimizer.min_lr} has no effect while {key}.decay is "
            "constant; leave it out, or set decay to linear or cosine"
        )
    if optimizer.warmup_steps >= num_updates:
        yield (
            f"{key}.warmup_steps: {optimizer.warmup_steps} must be below its {num_updates} updates "
            "in the run: batch.updates_per_step in each step in which it learns"
        )
