"""A tiny model in a real engine, with its weights written through the real receiver."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf.builder import routed_layers
from rlhf.dist.layout import RolloutLayout
from rlhf.platform.sglang_cpu import murmur_hash32
from rlhf.reshard.execute import Mover, MoveStats
from rlhf.reshard.schedule import RankPlan, rank_plans
from rlhf.reshard.topology import Topology
from rlhf.reshard.transport import LocalTransport
from rlhf.reshard.windows import Window
from rlhf.rollout.engine import Completion, EngineSpec, SampleRequest
from rlhf.rollout.host_client import EngineHost
from rlhf.rollout.node_host import NodeHost
from rlhf.rollout.zygote import Zygote
from rlhf.weights.families import (
    full_pieces,
    rollout_padding_params,
    rollout_param_shapes,
    rollout_pieces,
)
from rlhf.weights.model_shape import load_model_shape
from rlhf.weights.spread import spread_of_shards
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shards import dtypes_of, slices

AREA_BYTES = 1 << 17
"""Small enough that an update has several rounds."""
LIMIT_S = 60.0
PROMPTS = tuple(tuple(range(3, 3 + n)) for n in (1, 2, 5, 17, 40))


def make_spec(folder: Path, **overrides: Any) -> EngineSpec:
    """A small float32 engine on cores from 0."""
    shape = load_model_shape(folder)
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "vocab_size": shape.vocab_size,
        "max_position": shape.max_position,
        "context_tokens": 256,
        "routed": routed_layers(shape),
        "dtype": "float32",
        "max_running_requests": 16,
        "start_timeout_s": 120.0,
    }
    settings |= overrides
    cores = os.cpu_count() or 1
    num_ranks = settings.get("tp", 1) * settings.get("pp", 1) // settings.get("num_nodes", 1)
    settings.setdefault("cores", tuple(i % cores for i in range(num_ranks)))
    return EngineSpec(**settings)


class EngineCase:
    """One engine and the movers that fill it; every rank of its layout holds the full tensors."""

    def __init__(self, folder: Path, zygote: Zygote | None, **overrides: Any) -> None:
        self.folder = folder
        self.spec = make_spec(folder, **overrides)
        self.shape = load_model_shape(folder)
        self.engine = EngineHost.launch(self.spec, zygote)
        others = [replace(self.spec, node=n) for n in range(1, self.spec.num_nodes)]
        self.followers = [NodeHost.launch(spec, zygote) for spec in others]
        self.info = self.engine.wait_ready()
        self.follower_pids = [host.wait_ready().pids for host in self.followers]
        self.params: dict[str, Tensor] = {}
        self._movers: list[Mover] = []
        self._readers: list[Mover] = []
        self._read: list[dict[str, Tensor]] = []

    def open(self, state: Mapping[str, Tensor]) -> None:
        """Show the receivers their windows, again if they have others."""
        self.params = dict(state)
        dtype = getattr(torch, self.spec.dtype)
        there, back = self._plans(dtype.itemsize)
        self._read = [self._empty_shard(plan.rank) for plan in there]
        self._movers, self._readers = [], []
        for plan, way_back, shard in zip(there, back, self._read, strict=True):
            window = Window(AREA_BYTES, num_sums=plan.num_arriving)
            transport = LocalTransport(plan.rank, {})
            padding = rollout_padding_params(self.shape, self.layout, plan.rank)
            settings: dict[str, Any] = {"dtype": dtype, "limit_s": LIMIT_S}
            self._movers.append(
                Mover(plan, self.params, transport, window, padding_params=padding, **settings)
            )
            self._readers.append(Mover(way_back, window, transport, shard, **settings))
        both = zip(self._movers, self._readers, strict=True)
        self.engine.call_loader([mover.open_message(reader) for mover, reader in both])
        for mover in self._movers:
            mover.window.wait_opened(LIMIT_S, self.engine.poll)

    @property
    def layout(self) -> RolloutLayout:
        spec = self.spec
        return RolloutLayout(spec.num_ranks, tp=spec.tp, dp=spec.dp, ep=spec.ep, pp=spec.pp)

    def _plans(self, itemsize: int) -> tuple[list[RankPlan], list[RankPlan]]:
        """From full tensors on every rank to its engine's shard, and of that to itself."""
        world, held = self.layout.world, full_pieces(self.shape)
        needed = [rollout_pieces(self.shape, self.layout, rank) for rank in range(world)]
        settings: dict[str, Any] = {"itemsize": itemsize, "area_bytes": AREA_BYTES}
        topology = Topology.of(world, 8)
        there = rank_plans(spread_of_shards([held] * world, needed), topology, **settings)
        kept = spread_of_shards(needed, needed)
        return there, rank_plans(kept, topology, local_area="outgoing", **settings)

    def _empty_shard(self, rank: int) -> dict[str, Tensor]:
        """NaN; of the shapes and dtypes that the engine's parameters have."""
        pieces = rollout_pieces(self.shape, self.layout, rank)
        dtype = getattr(torch, self.spec.dtype)
        dtypes = dtypes_of(pieces, dtype)
        shapes = rollout_param_shapes(self.shape, self.layout, rank)
        return {
            name: torch.full(size, float("nan"), dtype=dtypes.get(name, dtype))
            for name, size in shapes.items()
        }

    def begin(self) -> None:
        messages = [mover.update_message(verify=True) for mover in self._movers]
        self.engine.begin_update(messages, LIMIT_S)

    def run_movers(self) -> None:
        """All ranks at once; the first looks after the engine. Verified."""
        faults = [fault for stats in self._run(self._movers, verify=True) for fault in stats.faults]
        if faults:
            raise RuntimeError(f"not what was sent: {faults}")

    def _run(self, movers: list[Mover], *, verify: bool) -> list[MoveStats]:
        polls = [self.engine.poll, *[no_poll] * (self.spec.num_ranks - 1)]
        both = zip(movers, polls, strict=True)
        return in_threads([partial(m.run, poll, verify=verify) for m, poll in both], LIMIT_S)

    def read(self) -> list[dict[str, Tensor]]:
        """By rank: the live parameters as the engine's processes have them, padding NaN."""
        for shard in self._read:
            for tensor in shard.values():
                tensor.fill_(float("nan"))
        messages = [reader.update_message() for reader in self._readers]
        self.engine.begin_read(messages, LIMIT_S)
        self._run(self._readers, verify=False)
        self.engine.end_read()
        return self._read

    def exported(self, state: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The same, cut out of an export."""
        ranks = range(self.layout.world)
        out = [self._empty_shard(rank) for rank in ranks]
        for rank, shard in zip(ranks, out, strict=True):
            for piece in rollout_pieces(self.shape, self.layout, rank):
                view = shard[piece.param][slices(piece.local)]
                view.copy_(state[piece.tensor][slices(piece.region)].reshape(view.shape))
        return out

    def addresses(self) -> list[dict[str, int]]:
        """By rank: of the live parameters in the engine's processes."""
        self.engine.call_loader([{"op": "table"}] * self.spec.num_ranks)
        deadline, tables = time.monotonic() + LIMIT_S, []
        for window in self.windows:
            while (table := window.reply()) is None:  # later stages take their time
                self.engine.poll()
                assert time.monotonic() < deadline, "a rank did not say where its parameters are"
            tables.append({name: row["data_ptr"] for name, row in table.items()})
        return tables

    @property
    def windows(self) -> list[Window]:
        return [mover.window for mover in self._movers]

    def write(self, state: Mapping[str, Tensor], version: int) -> None:
        """Bring the engine to these weights."""
        if not self._movers:
            self.open(state)
        self.params.update(state)
        self.begin()
        self.run_movers()
        self.engine.end_update(version)

    def generate(self, requests: list[SampleRequest]) -> list[Completion]:
        return self.engine.generate(requests, lambda _: None, LIMIT_S)

    def close(self) -> None:
        hosts = [self.engine, *self.followers]
        for host in hosts:
            host.freeze()
        for host in hosts:
            host.close()
        for mover in self._movers:
            mover.window.close()


@contextmanager
def engine_case(folder: Path, zygote: Zygote | None, **overrides: Any) -> Iterator[EngineCase]:
    case = EngineCase(folder, zygote, **overrides)
    try:
        yield case
    finally:
        case.close()


def load_reference(folder: Path) -> Any:
    """transformers' model, float32, eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def reference_state(model: Any) -> dict[str, Tensor]:
    """HF name -> tensor as in the checkpoint: no tied head, each expert by itself."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


@torch.no_grad()
def reference_logprobs(
    model: Any, prompt: tuple[int, ...], answer: list[int], temperature: float = 1.0
) -> Tensor:
    """[answer, vocabulary] log-softmax of logits / temperature at each answer position."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1)


def seeded_choice(logprobs: Tensor, seed: int, first_position: int) -> list[int]:
    """What a seed makes of [answer, vocabulary] log-probabilities: the Gumbel-max trick.

    The noise is a hash of seed, position of the token before, and token id.
    """
    num_tokens, num_ids = logprobs.shape
    hashed = murmur_hash32(
        torch.full((num_tokens,), seed),
        torch.arange(first_position, first_position + num_tokens),
        torch.arange(num_ids),
    )
    uniform = hashed.double() / (2**32 - 1)
    return (logprobs - torch.log(-torch.log(uniform))).argmax(-1).tolist()


@torch.no_grad()
def reference_routes(model: Any, prompt: tuple[int, ...], answer: list[int]) -> Tensor:
    """[L - 1, layers with routed experts, experts per token]: what the experts are called with."""
    chosen: list[Tensor] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    experts = [module for name, module in model.named_modules() if name.endswith("mlp.experts")]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in experts]
    model(torch.tensor([[*prompt, *answer[:-1]]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).to(torch.int16)


def greedy(prompt: tuple[int, ...], key: int, num_tokens: int = 16) -> SampleRequest:
    return SampleRequest(
        key=key,
        token_ids=prompt,
        seed=0,
        temperature=0.0,
        max_new_tokens=num_tokens,
        ignore_eos=True,
    )


def sampled(prompt: tuple[int, ...], key: int, seed: int, **changes: Any) -> SampleRequest:
    settings: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    return SampleRequest(key=key, token_ids=prompt, seed=seed, **settings | changes)
