"""What a rollout engine is asked and what it answers: records and the protocol. No SGLang here.

An engine takes token ids and gives token ids with the log-probability of each. Log-probabilities
are ``log_softmax(logits / temperature)`` over the full vocabulary, before top-p and top-k; greedy
requests (temperature 0) give those of temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

from rlhf.dist.layout import Quantization
from rlhf.dist.lost import LostPeer
from rlhf.rollout.engine_state import ALL_PARTS, EngineParts
from rlhf.types import Status

RESERVED_TOKENS = 8
"""SGLang keeps a few positions of the context and of the KV cache for itself."""

SEED_LIMIT = 2**63


class EngineDied(RuntimeError):  # noqa: N818  (an event, named as such)
    """The engine's processes are gone, or do not answer; the message names the cause."""


class EngineLostPeer(EngineDied, LostPeer):
    """An engine over several nodes lost a connection: another node of it knows the cause."""


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The layers ``first`` to ``stop - 1``, the model's last, have routed experts."""

    first: int
    stop: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine: its model, its layout and its limits.

    ``context_tokens`` is the longest prompt plus answer. ``kv_tokens`` empty means: on a CPU room
    for ``max_running_requests`` full contexts, on a GPU what ``mem_fraction`` leaves.
    ``cores`` are the CPU cores of the schedulers, an equal share for each rank of the engine on
    this node (CPU engines only). ``first_device`` is the CUDA device of the first of them.

    An engine has ``tp * pp`` ranks, a scheduler process each; rank r is tp rank ``r % tp`` of
    pipeline stage ``r // tp``. ``dp`` and ``ep`` are inside tp: attention is data parallel over
    ``dp`` groups of ``tp / dp`` ranks, experts are spread over ``ep`` groups of ``tp / ep``.

    Over ``num_nodes`` nodes it has as many ranks on each, in order, and a host process on each;
    this spec is that of number ``node``. They meet at ``address``, ``host:port`` of the first.
    """

    model_path: str
    vocab_size: int
    max_position: int
    context_tokens: int
    routed: RoutedLayers | None = None
    """None: a model without routed experts."""
    routes: bool = False
    """Answer with the experts of each token too."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantization: Quantization = "none"
    device: Literal["cpu", "cuda"] = "cpu"
    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    num_nodes: int = 1
    node: int = 0
    address: str = ""
    cores: tuple[int, ...] = (0,)
    first_device: int = 0
    first_port: int | None = None
    """Of its ENGINE_PORTS; None: it looks for free ones."""
    fp32_head: bool = True
    deterministic: bool = True
    prefix_cache: bool = True
    random_seed: int = 0
    max_running_requests: int = 64
    kv_tokens: int | None = None
    mem_fraction: float = 0.6
    free_host_weights: bool = False
    """Asleep on a CPU: give the memory of the weights back."""
    receiver: str = "rlhf.rollout.receiver.load"
    """Function (model, named_tensors) that writes weights inside SGLang's scheduler processes."""
    start_timeout_s: float = 300.0
    hang_limit_s: float = 120.0
    """A host or scheduler that does not answer for so long counts as dead."""

    def __post_init__(self) -> None:
        """Refuse what cannot start.

        Raises:
            ValueError: with the two numbers that do not fit.
        """
        if self.num_nodes > 1 and (self.num_ranks % self.num_nodes or not self.address):
            raise ValueError(
                f"an engine of {self.num_ranks} ranks over {self.num_nodes} nodes: every node must "
                f"have as many of them, and an address where they meet, is {self.address!r}"
            )
        if not 0 <= self.node < self.num_nodes:
            raise ValueError(f"node {self.node} of an engine must be below its {self.num_nodes}")
        if self.device == "cpu" and (
            len(self.cores) % self.num_local_ranks or not self.cores or min(self.cores) < 0
        ):
            raise ValueError(
                f"engine cores {self.cores}: their number must be a multiple of "
                f"{self._local_ranks_text}, so that each rank has cores of its own"
            )
        if self.device == "cpu" and self.quantization != "none":
            raise ValueError(
                f"rollout.quantization={self.quantization} needs a GPU: SGLang has its matrix "
                "products with block fp8 as GPU kernels only"
            )
        for name in ("dp", "ep"):
            if self.tp % getattr(self, name):
                raise ValueError(
                    f"rollout.{name}={getattr(self, name)} must divide rollout.tp={self.tp}"
                )
        if self.routes and (self.routed is None or self.pp > 1):
            raise ValueError(
                f"rollout.routes: needs a model with routed experts and rollout.pp=1, is {self.pp}"
            )
        if self.context_tokens + RESERVED_TOKENS > self.max_position:
            raise ValueError(
                f"prompt and answer of {self.context_tokens} tokens and {RESERVED_TOKENS} that "
                f"the engine reserves exceed max_position_embeddings={self.max_position} of "
                f"{self.model_path}; lower data.max_prompt_tokens or "
                "rollout.sampling.max_new_tokens"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.context_tokens + RESERVED_TOKENS:
            raise ValueError(
                f"rollout.kv_tokens={self.kv_tokens} must hold one full context: "
                f"{self.context_tokens} + {RESERVED_TOKENS} tokens"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def num_local_ranks(self) -> int:
        """Ranks on this node."""
        return self.num_ranks // self.num_nodes

    @property
    def core_groups(self) -> tuple[tuple[int, ...], ...]:
        """The cores of each rank on this node."""
        size = len(self.cores) // self.num_local_ranks
        return tuple(self.cores[i * size : (i + 1) * size] for i in range(self.num_local_ranks))

    @property
    def scheduler_names(self) -> tuple[str, ...]:
        """What the scheduler process of each rank on this node is called."""
        first = self.node * self.num_local_ranks
        ranks = range(first, first + self.num_local_ranks)
        return tuple(scheduler_name(r % self.tp, r // self.tp) for r in ranks)

    @property
    def _local_ranks_text(self) -> str:
        if self.num_nodes == 1:
            return f"rollout.tp*rollout.pp={self.num_ranks}"
        return f"the engine's {self.num_local_ranks} ranks on a node"


def scheduler_name(tp_rank: int, stage: int) -> str:
    """``scheduler tp0``; in later pipeline stages ``scheduler tp0 pp1``."""
    return f"scheduler tp{tp_rank}" + (f" pp{stage}" if stage else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One answer to one prompt.

    ``key`` is the caller's, unique within a call. ``seed`` decides the sample together with the
    position (deterministic engines only): two requests with one prompt and one seed get one answer.
    The model's own end tokens stop an answer as ``stop_token_ids`` do; with ``ignore_eos`` nothing
    does.
    """

    key: int
    token_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    """Answer with those of the prompt's tokens too; nothing of it is taken from the cache then."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to the request with this key.

    ``token_ids`` are those sampled, the token that stopped the answer included; ``logprobs`` has
    one entry for each. ``version`` is the weight version that sampled them. ``routes`` are those
    of prompt and answer (``rlhf.rollout.routes``), None unless the spec asks for them.
    """

    key: int
    token_ids: list[int]
    logprobs: list[float]
    status: Status
    version: int
    routes: np.ndarray | None = field(default=None, compare=False)
    prompt_logprobs: list[float] | None = None
    """Of the prompt's tokens from the second on; None unless asked for."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a started engine. ``pids``: process name -> pid, the host included."""

    pids: Mapping[str, int]
    kv_tokens: int
    start_s: float


class RolloutEngine(Protocol):
    """What the loop, the collector and the resharder need of an engine."""

    @property
    def late_s(self) -> float:
        """Seconds from the end of the last generation in the engine to the end of the call that
        asked for it: what the rank did with answers after the engine had none left."""
        ...

    def generate(
        self,
        requests: Sequence[SampleRequest],
        on_completion: Callable[[Completion], None],
        timeout_s: float,
    ) -> list[Completion]:
        """All answers, in the order of the requests; ``on_completion`` runs as each arrives."""
        ...

    def begin_update(self, messages: Sequence[dict[str, Any]], limit_s: float) -> None: ...

    def end_update(self, version: int) -> None: ...

    def abandon_update(self) -> None: ...

    def begin_read(self, messages: Sequence[dict[str, Any]], limit_s: float) -> None: ...

    def end_read(self) -> None: ...

    def call_loader(self, messages: Sequence[dict[str, Any]], limit_s: float = 60.0) -> None: ...

    def sleep(self, parts: EngineParts = ALL_PARTS) -> None: ...

    def wake(self, parts: EngineParts = ALL_PARTS) -> None: ...

    def abort(self) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> None: ...


def check_requests(requests: Sequence[SampleRequest], spec: EngineSpec) -> None:
    """Refuse, before anything is sent, what an engine would refuse late or die of.

    Raises:
        ValueError: names the request, the field and the limit.
    """
    keys: set[int] = set()
    samples: dict[tuple[tuple[int, ...], int], int] = {}
    for request in requests:
        fault = _fault(request, spec)
        if fault is None and request.key in keys:
            fault = "the key is used twice; keys must be unique within a call"
        keys.add(request.key)
        if fault is None and spec.deterministic and request.temperature > 0:
            first = samples.setdefault((request.token_ids, request.seed), request.key)
            if first != request.key:
                fault = (
                    f"same prompt and same seed {request.seed} as request {first}: the two "
                    "samples would be identical; give each its own seed"
                )
        if fault is not None:
            raise ValueError(f"request {request.key}: {fault}")


def _fault(request: SampleRequest, spec: EngineSpec) -> str | None:
    prompt = len(request.token_ids)
    if prompt == 0:
        return "the prompt is empty; it must have at least one token"
    if request.max_new_tokens < 1:
        return f"max_new_tokens={request.max_new_tokens} must be at least 1"
    if prompt + request.max_new_tokens > spec.context_tokens:
        return (
            f"prompt of {prompt} tokens + max_new_tokens={request.max_new_tokens} exceed the "
            f"engine's context of {spec.context_tokens} tokens"
        )
    for what, ids in (("prompt", request.token_ids), ("stop", request.stop_token_ids)):
        outside = [i for i in ids if not 0 <= i < spec.vocab_size]
        if outside:
            return f"{what} token id {outside[0]} is outside the vocabulary of {spec.vocab_size}"
    if request.ignore_eos and request.stop_token_ids:
        return "ignore_eos lets nothing stop the answer; give no stop_token_ids with it"
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        return f"temperature={request.temperature} must be finite and not negative"
    if not 0 < request.top_p <= 1:
        return f"top_p={request.top_p} must be in (0, 1]"
    if request.top_k != -1 and request.top_k < 1:
        return f"top_k={request.top_k} must be -1 (off) or at least 1"
    if not 0 <= request.seed < SEED_LIMIT:
        return f"seed={request.seed} must be in [0, 2**63)"
    return None
