"""The demo's job on TRL's GRPOTrainer; run by ``peer`` with the interpreter of TRL's environment.

Imports nothing of this package. Prints one JSON line: seconds, generation seconds and reward per
step, peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rewards(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Exact match of the first line."""
    return [float(c.split("\n")[0].strip() == a) for c, a in zip(completions, answer, strict=True)]


class StepClock(TrainerCallback):
    """Whole steps, optimizer included."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append({"seconds": time.perf_counter() - self._began})

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if self.steps and logs and "reward" in logs:
            self.steps[-1]["reward"] = logs["reward"]


def settings(args: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=args.prompts * args.samples,
        gradient_accumulation_steps=1,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=args.lr,
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        seed=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--dtype", default="float32")
    for name, value in (("steps", 6), ("prompts", 16), ("samples", 8), ("new_tokens", 5)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, newline]
    with open(args.rows, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=settings(args, args.output),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.add_callback(clock)
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("RESULT " + json.dumps({"steps": clock.steps, "peak_gib": peak}))


if __name__ == "__main__":
    main()
