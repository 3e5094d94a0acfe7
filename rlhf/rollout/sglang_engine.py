"""How an SGLang engine is started and spoken to. Runs in the engine host only.

Engine weights are never read from disk: the engine starts with dummy weights, and
the spec's receiver writes everything in place.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.scheduler import run_scheduler_process

from rlhf.rollout.engine import RESERVED_TOKENS, EngineSpec, SampleRequest
from rlhf.rollout.lifeline import die_with_parent, write_obituary

NEVER = 2**30
"""Tokens between two partial outputs of a request: only the first and the last are sent."""


def server_args(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine`` for this spec."""
    args: dict[str, Any] = {
        "model_path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "tp_size": spec.tp,
        "load_format": "dummy",
        "custom_weight_loader": [spec.receiver],
        "skip_tokenizer_init": True,
        "context_length": spec.context_tokens + RESERVED_TOKENS,
        "max_running_requests": spec.max_running_requests,
        "random_seed": spec.random_seed,
        "enable_deterministic_inference": spec.deterministic,
        "disable_radix_cache": not spec.prefix_cache,
        "chunked_prefill_size": -1 if spec.deterministic else None,
        "enable_fp32_lm_head": spec.fp32_head and spec.dtype == "bfloat16",
        "disable_shared_experts_fusion": True,
        "sleep_on_idle": True,
        "watchdog_timeout": spec.hang_limit_s,
        "log_level": "error",
    }
    if spec.kv_tokens is not None:
        args["max_total_tokens"] = spec.kv_tokens
    if spec.device == "cpu":
        full = spec.max_running_requests * (spec.context_tokens + RESERVED_TOKENS)
        args |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": spec.kv_tokens or full,
            "mem_fraction_static": 0.2,  # not used: max_total_tokens decides
        }
    else:
        args |= {
            "mem_fraction_static": spec.mem_fraction,
            "base_gpu_id": spec.first_device,
            "enable_memory_saver": True,
        }
    return args


def sampling_params(request: SampleRequest, deterministic: bool) -> dict[str, Any]:
    """SGLang's sampling parameters of one request."""
    params: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "skip_special_tokens": False,
        "stream_interval": NEVER,
    }
    if deterministic:
        params["sampling_seed"] = request.seed
    return params


def start_engine(spec: EngineSpec, *, fork: bool, obituary_fd: int, close_fds: list[int]) -> Engine:
    """Build the engine; blocks until its schedulers are ready.

    Args:
        fork: children are forked from this process, which must have one thread and no CUDA
            context; otherwise they are spawned and import everything again.
        obituary_fd: where a child that fails says why.
        close_fds: descriptors of the host that forked children must not hold open.
    """
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
        ",".join(map(str, group)) for group in spec.core_groups
    )
    if spec.device != "cpu":
        del os.environ["SGLANG_CPU_OMP_THREADS_BIND"]
    kind = _ForkingEngine if fork else _SpawningEngine
    return kind(spec, obituary_fd, close_fds)


class _SpawningEngine(Engine):  # type: ignore[misc]  (SGLang is untyped)
    """SGLang's engine with children that die with the host and leave word when they fail."""

    def __init__(self, spec: EngineSpec, obituary_fd: int, close_fds: list[int]) -> None:
        obituary = Connection(os.dup(obituary_fd), readable=False)
        child = partial(
            run_child,
            obituary=obituary,
            close_fds=close_fds,
            num_threads=len(spec.core_groups[0]) if spec.device == "cpu" else None,
        )
        self.run_scheduler_process_func = partial(child, run_scheduler_process, "scheduler")
        self.run_detokenizer_process_func = partial(child, run_detokenizer_process, "detokenizer")
        super().__init__(**server_args(spec))


class _ForkingEngine(_SpawningEngine):
    """The same with forked children: nothing is imported twice."""

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        # Engine sets "spawn" for the whole process shortly before it calls this.
        mp.set_start_method("fork", force=True)
        return super()._launch_scheduler_processes(*args, **kwargs)


def run_child(
    target: Callable[..., None],
    name: str,
    *args: Any,
    obituary: Connection,
    close_fds: list[int],
    num_threads: int | None,
) -> None:
    """Entry of a scheduler or detokenizer process."""
    parent = mp.parent_process()
    assert parent is not None and parent.pid is not None
    die_with_parent(parent.pid)
    if mp.get_start_method() == "fork":
        for fd in close_fds:
            os.close(fd)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if name == "scheduler":
        name = f"scheduler tp{args[3]}"
    logging.getLogger("sglang").addHandler(_LastWords(obituary.fileno(), name))
    target(*args)


class _LastWords(logging.Handler):
    """Copies what a child logs as an error, mostly a traceback, into the obituary in one line."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(level=logging.ERROR)
        self._fd = fd
        self._name = name

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().strip().splitlines()
        if lines:
            write_obituary(self._fd, f"{self._name}: {lines[-1].strip()}")


def loader_payloads(messages: Sequence[str]) -> list[Any]:
    """One serialized payload per tp rank: the message is the name of an empty tensor."""
    from sglang.srt.utils import MultiprocessingSerializer

    return [
        MultiprocessingSerializer.serialize([(message, torch.empty(0))]) for message in messages
    ]
