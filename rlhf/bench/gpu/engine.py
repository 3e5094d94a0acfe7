"""A tiny model in a real engine: weights in place, greedy tokens, sleep and wake."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.bench.gpu.check import Figures, Sizes, free_gib, require
from rlhf.dist.layout import RolloutLayout
from rlhf.reshard.execute import Mover
from rlhf.reshard.schedule import rank_plan
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalHub
from rlhf.reshard.windows import Window
from rlhf.rollout.engine import Completion, EngineSpec, SampleRequest
from rlhf.rollout.host_client import EngineHost
from rlhf.weights.families import (
    full_pieces,
    full_shapes,
    rollout_padding_params,
    rollout_pieces,
)
from rlhf.weights.hf_checkpoint import load_pieces
from rlhf.weights.model_shape import load_model_shape
from rlhf.weights.spread import spread_of_shards

AREA_BYTES = 2**20
LIMIT_S = 60.0
START_LIMIT_S = 300.0
NEW_TOKENS = 24
PROMPTS = tuple(tuple(range(3, 3 + n)) for n in (1, 5, 17, 40))
LARGEST_GAP = {"cuda": 0.1, "cpu": 1e-4}
"""Of log-probabilities, by device: the engine runs in bfloat16 on a GPU, in float32 on a CPU."""
LEAST_FREED = 0.5
"""Of what an engine takes of the device, after a sleep. The rest is its context and graphs."""
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def check_engine(device: torch.device, sizes: Sizes) -> Figures:
    """Greedy tokens are transformers', log-probabilities nearly so; again after sleep and wake."""
    before = free_gib(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = _write_model(folder)
        with _Engine(folder, device).opened() as engine:
            engine.update(0)
            first = _gap(reference, engine.generate(), device)
            awake = free_gib(device)
            engine.host.sleep()
            asleep = free_gib(device)
            engine.host.wake()
            engine.update(1)
            second = _gap(reference, engine.generate(), device)
            woken = free_gib(device)
    require_freed(before, awake, asleep)
    return {
        "logprobs_off": first,
        "logprobs_off_after_sleep": second,
        "free_gib": {
            "before": before,
            "awake": awake,
            "asleep": asleep,
            "woken": woken,
            "after": free_gib(device),
        },
    }


def require_freed(before: float | None, awake: float | None, asleep: float | None) -> None:
    """Free GiB without the engine, with it, and in its sleep; on a CPU nothing is known of them.

    Raises:
        CheckFailed: less than LEAST_FREED of what it took came back.
    """
    if before is not None and awake is not None and asleep is not None:
        freed = (asleep - awake) / (before - awake)
        require(freed >= LEAST_FREED, f"a sleep freed {freed:.2f} of the engine < {LEAST_FREED}")


class _Engine:
    """An engine host and the mover that fills it with the checkpoint's weights."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        shape = load_model_shape(folder)
        spec = EngineSpec(
            model_path=str(folder),
            vocab_size=shape.vocab_size,
            max_position=shape.max_position,
            context_tokens=128,
            dtype="bfloat16" if device.type == "cuda" else "float32",
            device="cuda" if device.type == "cuda" else "cpu",
            first_device=device.index or 0,
            max_running_requests=8,
            mem_fraction=0.3,
            start_timeout_s=START_LIMIT_S,
        )
        dtype = getattr(torch, spec.dtype)
        self.params = {
            name: torch.empty(size, dtype=dtype, device=device)
            for name, size in full_shapes(shape).items()
        }
        load_pieces(folder, full_pieces(shape), self.params)
        layout = RolloutLayout(1)
        needed = rollout_pieces(shape, layout, 0)
        mine = rank_plan(
            spread_of_shards([full_pieces(shape)], [needed]),
            Topology.of(1, 1),
            0,
            itemsize=dtype.itemsize,
            area_bytes=AREA_BYTES,
        )
        self.mover = Mover(
            mine,
            self.params,
            LocalHub(1).transport(0),  # nothing leaves the rank
            Window(mine.incoming_area_bytes, device, mine.num_arriving),
            dtype=dtype,
            limit_s=LIMIT_S,
            padding_params=rollout_padding_params(shape, layout, 0),
        )
        self.host = EngineHost.launch(spec)

    @contextmanager
    def opened(self) -> Iterator[_Engine]:
        """With its window open; the host ends at the end."""
        try:
            self.host.wait_ready()
            self.host.call_loader([self.mover.open_message()])
            self.mover.window.wait_opened(LIMIT_S, self.host.poll)
            yield self
        finally:
            self.host.close()
            self.mover.window.close()

    def update(self, version: int) -> None:
        """Every parameter is read back and its checksum compared."""
        self.host.begin_update([self.mover.update_message(verify=True)], LIMIT_S)
        stats = self.mover.run(self.host.poll, verify=True)
        require(not stats.faults, f"the engine does not hold what was sent: {stats.faults}")
        self.host.end_update(version)

    def generate(self) -> list[Completion]:
        requests = [
            SampleRequest(
                key=key,
                token_ids=prompt,
                seed=0,
                temperature=0.0,
                max_new_tokens=NEW_TOKENS,
                ignore_eos=True,
            )
            for key, prompt in enumerate(PROMPTS)
        ]
        return self.host.generate(requests, lambda _: None, LIMIT_S)


def _write_model(folder: Path) -> Any:
    """A model of random layers that all the same prefers one token after each, by a wide margin.

    The head's row of the next token is the embedding of this one, which the residual stream still
    holds at the end: rounding does not change a greedy choice, a wrong layer does change its
    log-probability.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SHAPE)
    config.initializer_range = 0.05
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    vocabulary, width = SHAPE["vocab_size"], SHAPE["hidden_size"]
    embedding = torch.randn(vocabulary, width)
    successor = torch.randperm(vocabulary)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight[successor] = embedding * (8 / width)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def _gap(model: Any, completions: list[Completion], device: torch.device) -> float:
    """Largest difference of log-probabilities; the tokens must be the greedy ones."""
    worst = 0.0
    for answer in completions:
        prompt, tokens = PROMPTS[answer.key], list(answer.token_ids)
        require(len(tokens) == NEW_TOKENS, f"{len(tokens)} tokens came, {NEW_TOKENS} were due")
        ids = torch.tensor([[*prompt, *tokens]])
        logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
        expected = logprobs.argmax(-1).tolist()
        require(tokens == expected, f"prompt {answer.key}: {tokens} came, greedy is {expected}")
        chosen: Tensor = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        off = float((torch.tensor(answer.logprobs).double() - chosen).abs().max())
        require(math.isfinite(off), f"prompt {answer.key}: log-probabilities are not finite")
        worst = max(worst, off)
    limit = LARGEST_GAP[device.type]
    require(worst <= limit, f"log-probabilities are off by {worst:.2e} > {limit:g}")
    return worst
