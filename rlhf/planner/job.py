"""What decides the memory of a run, out of its configuration."""

from __future__ import annotations

from rlhf.config.schema import Config
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.planner.memory import Job
from rlhf.weights.model_shape import ModelShape
from rlhf.weights.value_model import value_model_shape


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
        reference=config.algorithm.kl.place != "off",
        critic=None if critic is None else value_model_shape(critic),
        reward_model=None if scorer is None else value_model_shape(scorer),
    )
