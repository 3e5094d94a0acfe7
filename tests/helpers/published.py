"""Step times that other systems publish, with what is known of their load and layouts.

Tokens of a step are tokens/s/GPU x GPUs x seconds; answers per step are those of the published
recipes (NVIDIA-NeMo/RL examples/configs/recipes/llm/performance, of which grpo_math_1B.yaml is the
base: a reference model, packed micro-batches of one sequence's length, updates of 512 answers;
verl-project/verl examples/grpo_trainer/run_deepseek_v3_671b_megatron.sh). Prompts of 110 tokens are
assumed. The seconds in which these systems move weights are not ours: they are those that they
publish for the model, or the nearest to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.config.schema import MemorySection, ModelSection, RolloutSection, TrainSection
from rlhf.dist.layout_text import parse_rollout, parse_train
from rlhf.memory.table import Span
from rlhf.planner.load import Load, PhaseTime
from rlhf.planner.memory import Job, Machine
from rlhf.planner.speeds import H100, Speeds
from rlhf.planner.step_time import Moved, step_times
from rlhf.weights.find_model import find_model

PROMPT_TOKENS = 110
KV_TOKENS = 500_000
H20 = H100.model_copy(update={"device": "H20", "peak_tflops": 148.0, "hbm_gbs": 4000.0})
"""The same constants on another device: its data sheet's two figures."""


@dataclass(frozen=True)
class Published:
    """``gather_s``: of moving the weights in that system."""

    model: str
    gpus: int
    train: str
    rollout: str
    prompts: int
    samples: int
    tokens: float  # of a step
    longest_tokens: int  # of a sequence
    microbatch_tokens: int
    step_s: float
    gather_s: float
    updates: int = 1
    on_host: bool = False
    speeds: Speeds = H100

    def times(self, **changes: object) -> Mapping[Span, PhaseTime]:
        """By the time model."""
        train = parse_train(self.train, self.gpus)
        job = Job(
            shape=find_model(self.model),
            train_layout=train,
            rollout_layout=parse_rollout(self.rollout, self.gpus),
            model=ModelSection(path=self.model, fp32_head=False),
            train=TrainSection(sequence_parallel=train.tp > 1, recompute="full"),
            rollout=RolloutSection(),
            memory=MemorySection(optimizer="host" if self.on_host else "device"),
            window_bytes=2**29,
            longest_tokens=self.longest_tokens,
            reference=True,
        )
        machine = Machine(80 * 10**9, 2000 * 10**9, 8, 8 * 10**9)
        moved = Moved(self.gather_s, 0.0)
        return step_times(
            replace(job, **changes), self.speeds, self.load, machine, KV_TOKENS, moved
        )

    @property
    def load(self) -> Load:
        mean = self.tokens / (self.prompts * self.samples) - PROMPT_TOKENS
        return Load(
            prompts=self.prompts,
            samples=self.samples,
            prompt_tokens=PROMPT_TOKENS,
            answer_tokens=mean,
            longest_answer_tokens=self.longest_tokens - PROMPT_TOKENS,
            microbatch_tokens=self.microbatch_tokens,
            concurrency=256,
            updates=self.updates,
        )


DSV3, QWEN_235B, QWEN_30B = "deepseek-v3-671b", "qwen3-235b-a22b", "qwen3-30b-a3b"
QWEN_TRAIN = "tp=2,pp=8,cp=2,ep=16,etp=1,first=11,last=11"
PUBLISHED = {
    "NeMo-RL, DeepSeek-V3 on 256": Published(
        *(DSV3, 256, "pp=16,first=3,last=2,ep=16", "tp=32", 32, 16),
        *(12.1 * 256 * 134, 1536, 1536, 134.0, 14.0),
    ),
    "NeMo-RL, DeepSeek-V3 on 512": Published(
        *(DSV3, 512, "pp=16,first=3,last=2,ep=32", "tp=32", 32, 16),
        *(7.24 * 512 * 111, 1536, 1536, 111.0, 14.0),
    ),
    "NeMo-RL, Qwen3-235B on 128": Published(
        *(QWEN_235B, 128, QWEN_TRAIN, "tp=16", 16, 32),
        *(58.9 * 128 * 395, 8192, 8192, 395.0, 5.5),
    ),
    "NeMo-RL, Qwen3-235B on 256": Published(
        *(QWEN_235B, 256, QWEN_TRAIN, "tp=16", 16, 32),
        *(37.4 * 256 * 312, 8192, 8192, 312.0, 5.5),
    ),
    "NeMo-RL, Qwen3-30B-A3B on 32": Published(
        *(QWEN_30B, 32, "ep=8", "tp=2", 64, 32),
        *(1102 * 32 * 192, 4096, 4096, 192.0, 2.9),
        updates=4,
    ),
}
VERL = Published(
    *(DSV3, 96, "tp=8,pp=12,ep=8,etp=1,last=6", "tp=32", 96, 8),
    *(96 * 8 * (1960 + PROMPT_TOKENS), 8192 + PROMPT_TOKENS, 10240, 1700.0, 120.0),
    updates=3,
    on_host=True,
    speeds=H20,
)
"""Answers of 1,960 tokens in the mean and 8,192 at most are published with it."""
VERL_ROLLOUT_S = 1050.0
