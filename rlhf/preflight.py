"""Everything that can be known to be wrong before a process group exists."""

from __future__ import annotations

from rlhf.config.check import check_config
from rlhf.config.schema import Config
from rlhf.weights.families import full_shapes
from rlhf.weights.hf_checkpoint import check_index
from rlhf.weights.model_shape import ModelShape, load_model_shape


def check(config: Config, world: int, source: str) -> ModelShape:
    """The model's shape, after the configuration has been held against it and the world size.

    Raises:
        ValueError: all faults at once.
    """
    shape = load_model_shape(config.model.path)
    check_config(config, shape, world, source)
    check_index(config.model.path, full_shapes(shape))
    return shape


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
        tokenizer.single_token(text)
    prompts = build_prompt_source(config.data, tokenizer, config.seed).prompts
    held_out = build_eval_prompts(config.data, tokenizer)
    build_rewards(config.data).check([*prompts, *held_out])
