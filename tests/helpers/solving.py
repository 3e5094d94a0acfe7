"""Jobs around which the solver searches."""

from __future__ import annotations

from rlhf.bench.reshard_plan import Recipe
from rlhf.config.schema import MemorySection, ModelSection, RolloutSection, TrainSection
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.planner.load import Load
from rlhf.planner.memory import Job, Machine
from rlhf.weights.find_model import find_model

MACHINE = Machine(80 * 10**9, 2000 * 10**9, 8, 8 * 10**9)
ROWS = 16384


def whole(model: str, ranks: int, longest_tokens: int = 16384, **sections) -> Job:
    """Nothing is cut; weights and states leave the device in all phases that do without them."""
    settings = {
        "train": TrainSection(recompute="full", tokens_per_microbatch=ROWS),
        "rollout": RolloutSection(deterministic=False, max_running_requests=512, mem_fraction=0.7),
        "memory": MemorySection(time_slice="all", optimizer="host"),
    }
    return Job(
        shape=find_model(model),
        train_layout=TrainLayout(ranks),
        rollout_layout=RolloutLayout(ranks),
        model=ModelSection(path=model),
        window_bytes=2**29,
        longest_tokens=longest_tokens,
        **{**settings, **sections},
    )


def load(job: Job, prompts: int = 128, samples: int = 8) -> Load:
    """Half of the longest sequence is an answer in the mean."""
    longest = job.longest_tokens
    return Load(
        prompts=prompts,
        samples=samples,
        prompt_tokens=longest / 16,
        answer_tokens=longest / 2,
        longest_answer_tokens=longest * 15 / 16,
        microbatch_tokens=job.train.tokens_per_microbatch,
        concurrency=job.rollout.max_running_requests,
    )


def as_published(job: Job, recipe: Recipe) -> Job:
    """In the layouts of a published recipe, with as many rows of a micro-batch on a rank."""
    train, rollout = recipe.layouts
    keys = ("tp", "pp", "vpp", "cp", "ep", "etp", "first", "last")
    settings = {key: getattr(train, key) for key in keys}
    settings |= {
        "sequence_parallel": train.tp > 1,
        "tokens_per_microbatch": max(job.longest_tokens, ROWS * train.cp),
    }
    engines = {key: getattr(rollout, key) for key in ("tp", "dp", "ep", "a2a")}
    return Job(
        **{
            **{name: getattr(job, name) for name in Job.__dataclass_fields__},
            "train": job.train.model_copy(update=settings),
            "rollout": job.rollout.model_copy(update=engines),
            "train_layout": train,
            "rollout_layout": rollout,
        }
    )
