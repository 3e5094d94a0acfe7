"""What decides the memory and the time of a run, out of its configuration."""

from __future__ import annotations

from rlhf.config.schema import Config
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.planner.load import Load
from rlhf.planner.memory import Job
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.value_model import value_model_shape

USUAL_SHARE = 0.5
"""Assumed: of the longest prompt and answer that a configuration allows, in the mean."""


def job_of(
    config: Config,
    shape: ModelShape,
    train: TrainLayout,
    rollout: RolloutLayout,
    window_bytes: int,
) -> Job:
    """The job that ``config`` describes.

    Args:
        window_bytes: of one of a rank's two windows.

    Raises:
        ValueError: a model of another role is not usable.
    """
    critic = None if config.critic is None else config.critic.path or config.model.path
    scorer = None if config.reward_model is None else config.reward_model.path
    return Job(
        shape=shape,
        train_layout=train,
        rollout_layout=rollout,
        model=config.model,
        train=config.train,
        rollout=config.rollout,
        memory=config.memory,
        window_bytes=window_bytes,
        longest_tokens=config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens,
        num_updates=config.batch.updates_per_step,
        reference=config.algorithm.kl.place != "off",
        critic=None if critic is None else value_model_shape(critic),
        reward_model=None if scorer is None else value_model_shape(scorer),
    )


def load_of(
    config: Config, prompt_tokens: float | None = None, answer_tokens: float | None = None
) -> Load:
    """What a step of the configuration has to do.

    Args:
        prompt_tokens, answer_tokens: means; None: half of the longest that is allowed.

    Raises:
        ValueError: the mean prompt or answer is longer than the longest.
    """
    longest = config.rollout.sampling.max_new_tokens
    if prompt_tokens is not None and prompt_tokens > (most := config.data.max_prompt_tokens):
        raise ValueError(
            f"prompt_tokens: must be at most data.max_prompt_tokens={most}, is {prompt_tokens:g}"
        )
    usual = (USUAL_SHARE * config.data.max_prompt_tokens, USUAL_SHARE * longest)
    return Load(
        prompts=config.batch.prompts_per_step,
        samples=config.batch.samples_per_prompt,
        prompt_tokens=usual[0] if prompt_tokens is None else prompt_tokens,
        answer_tokens=usual[1] if answer_tokens is None else answer_tokens,
        longest_answer_tokens=longest,
        microbatch_tokens=config.train.tokens_per_microbatch,
        concurrency=config.rollout.max_running_requests,
        updates=config.batch.updates_per_step,
        save_every=config.checkpoint.every,
    )
