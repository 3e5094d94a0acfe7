"""A tiny megatron model in bfloat16 on the device against the same in float32 on the CPU.

The CPU's half runs in a process that sees no GPU: megatron takes its device from the process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.bench.gpu.check import CheckFailed, Figures, Sizes, one_rank, require
from rlhf.config.schema import ModelSection, OptimizerSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.mcore import parallel
from rlhf.mcore.forward import logprobs, train
from rlhf.mcore.model import TrainModel, build_model
from rlhf.mcore.optimizer import build_optimizer
from rlhf.mcore.spec import choose_kernels
from rlhf.platform import megatron_cpu
from rlhf.types import MicroBatch
from rlhf.weights.model_shape import parse_model_shape

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LENGTHS = (7, 64, 33, 128)
LIMIT_S = 120.0
LOGPROB_OFF, UPDATE_OFF, NORM_OFF, LEAST_COSINE = 0.03, 0.05, 0.02, 0.999
"""bfloat16 keeps 8 bits: mean difference of log-probabilities before and after an update, relative
difference of the gradient norm, and the cosine between the gradients."""


def check_model(device: torch.device, sizes: Sizes) -> Figures:
    """Log-probabilities, gradients and one update agree within what bfloat16 loses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu.pt"
        command = [sys.executable, "-m", "rlhf.bench.gpu.model", str(path)]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise CheckFailed(f"the CPU's half failed: {done.stderr[-2000:]}")
        exact = torch.load(path)
    got = passes("bfloat16", device)
    figures = {
        "engine_kernels": choose_kernels(torch.bfloat16).engine,
        "logprobs_off": _mean_off(got["before"], exact["before"]),
        "logprobs_off_after_update": _mean_off(got["after"], exact["after"]),
        "grad_norm_off": abs(float(got["grad_norm"] / exact["grad_norm"]) - 1),
        "grad_cosine": float(torch.cosine_similarity(got["grads"], exact["grads"], dim=0)),
        "update": _mean_off(exact["after"], exact["before"]),
    }
    _require_at_most("logprobs_off", LOGPROB_OFF, figures)
    _require_at_most("logprobs_off_after_update", UPDATE_OFF, figures)
    _require_at_most("grad_norm_off", NORM_OFF, figures)
    cosine = figures["grad_cosine"]
    require(cosine >= LEAST_COSINE, f"grad_cosine is {cosine:.5f} < {LEAST_COSINE}")
    return figures


def _mean_off(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().mean())


def _require_at_most(name: str, limit: float, figures: dict[str, Any]) -> None:
    value = figures[name]
    require(value <= limit, f"{name} is {value:.4f} > {limit}")  # False for NaN


def passes(dtype: str, device: torch.device) -> dict[str, Tensor]:
    """``before`` and ``after`` one update [T], ``grads`` of all parameters, ``grad_norm``; float64
    on the host."""
    megatron_cpu.install()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = TrainLayout(1)
    with one_rank(device):
        parallel.initialize(layout, timeout_s=60, seed=1)
        try:
            shape = parse_model_shape(CONFIG)
            section = ModelSection(path="none", dtype=dtype)
            model = build_model(shape, layout, section, TrainSection(), trainable=True)
            fill_weights(model)
            settings = OptimizerSection(lr=1e-3, clip_grad=0.0, weight_decay=0.0)
            optimizer = build_optimizer(model, settings, 1)
            micro = [_micro_batch(model.device)]
            before = logprobs(model, micro, 1.0)
            stats = train(model, optimizer, micro, _loss)
            grads = [model.params[name].main_grad.flatten() for name in sorted(model.params)]
            after = logprobs(model, micro, 1.0)
            out = {
                "before": before,
                "after": after,
                "grads": torch.cat(grads),
                "grad_norm": torch.tensor(stats.grad_norm),
            }
            return {name: value.detach().cpu().double() for name, value in out.items()}
        finally:
            parallel.shutdown()


def fill_weights(model: TrainModel) -> None:
    """Weights that depend on nothing but their names' order; all are exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for name in sorted(model.params):
        parameter = model.params[name]
        drawn = torch.randn(parameter.shape, generator=generator)
        values = 1 + 0.1 * drawn if parameter.dim() == 1 else 0.05 * drawn
        parameter.data.copy_(values.bfloat16())


def _micro_batch(device: torch.device) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return MicroBatch(
        tokens=torch.randint(3, CONFIG["vocab_size"], (count,), generator=generator).to(device),
        positions=positions.to(device),
        mask=(positions > 0).to(device),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device),
        columns={"advantages": torch.randn(count, generator=generator).to(device)},
    )


def _loss(
    logprobs: Tensor, entropy: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -(logprobs * columns["advantages"]).mean() - 0.1 * entropy.mean()
    return loss, {"loss": loss}


def main() -> int:
    """The CPU's half, in float32, into a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path")
    torch.save(passes("float32", torch.device("cpu")), parser.parse_args().path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
