"""How an SGLang engine is started and spoken to. Runs in the engine host only.

Engine weights are never read from disk: the engine starts with dummy weights, and
the spec's receiver writes everything in place.
"""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.server_args import (
    DP_ATTENTION_HANDSHAKE_PORT_DELTA,
    ZMQ_TCP_PORT_DELTA,
    PortArgs,
)

from rlhf.dist.ports import ENGINE_PORTS
from rlhf.dist.scratch import lent_name, note_process
from rlhf.rollout.engine import RESERVED_TOKENS, EngineSpec, SampleRequest, scheduler_name
from rlhf.rollout.lifeline import die_with_parent, write_obituary
from rlhf.rollout.sglang_args import BLOCK_FP8, cut_args
from rlhf.rollout.sglang_manager import keep_groups_together, needs_groups_together

NEVER = 2**30
"""Tokens between two partial outputs of a request: only the first and the last are sent."""
ROUTED_CHUNK_TOKENS = 8192
DERIVED_PORTS = (
    DP_ATTENTION_HANDSHAKE_PORT_DELTA,
    *range(ZMQ_TCP_PORT_DELTA, ZMQ_TCP_PORT_DELTA + 7),
)
"""What SGLang binds with DP-attention, counted from ``port``."""


NCCL_PORT = ENGINE_PORTS - 1
"""Behind the first of planned ports. SGLang binds the first, with DP-attention the next six and
that DP_ATTENTION_HANDSHAKE_PORT_DELTA behind."""


def server_args(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine`` for this spec."""
    args: dict[str, Any] = {
        "model_path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        **_layout_args(spec),
        "load_format": "dummy",
        "custom_weight_loader": [spec.receiver],
        "skip_tokenizer_init": True,
        "context_length": spec.context_tokens + RESERVED_TOKENS,
        "max_running_requests": spec.max_running_requests,
        "random_seed": spec.random_seed,
        "enable_deterministic_inference": spec.deterministic,
        "disable_radix_cache": not spec.prefix_cache,
        "chunked_prefill_size": _prefill_chunk(spec),
        "enable_return_routed_experts": spec.routes,
        "enable_fp32_lm_head": spec.fp32_head and spec.dtype == "bfloat16",
        "sleep_on_idle": True,
        "watchdog_timeout": spec.hang_limit_s,
        "log_level": "error",
    }
    if spec.quantization != "none":
        # of the kernels this one alone leaves weights and scales as they come on every GPU
        args["fp8_gemm_runner_backend"] = "triton"
        args["json_model_override_args"] = json.dumps(BLOCK_FP8)
    if spec.kv_tokens is not None:
        args["max_total_tokens"] = spec.kv_tokens
    if spec.device == "cpu":
        requests = -(-spec.max_running_requests // spec.dp)  # of one DP-attention group
        full = requests * (spec.context_tokens + RESERVED_TOKENS)
        args |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "max_total_tokens": spec.kv_tokens or full,
            # max_total_tokens decides; but an engine refuses to start when others on the machine
            # have taken more than this of what was free before it loaded its weights
            "mem_fraction_static": 0.9,
        }
    else:
        args |= {
            "mem_fraction_static": spec.mem_fraction,
            "base_gpu_id": spec.first_device,
            "enable_memory_saver": True,
        }
        if spec.routed is not None:
            args["moe_runner_backend"] = "triton"  # others permute the experts' weights
    return args


def _layout_args(spec: EngineSpec) -> dict[str, Any]:
    """How the model is cut, and the ports of that."""
    has_experts = spec.routed is not None
    args = cut_args(tp=spec.tp, dp=spec.dp, ep=spec.ep, pp=spec.pp, has_experts=has_experts)
    if spec.dp > 1:
        args["enable_dp_attention_local_control_broadcast"] = True  # wakes every group at once
    if spec.num_nodes > 1:
        args |= {"nnodes": spec.num_nodes, "node_rank": spec.node, "dist_init_addr": spec.address}
    elif spec.first_port is not None:
        args["dist_init_addr"] = f"127.0.0.1:{spec.first_port}"
        args["nccl_port"] = spec.first_port + NCCL_PORT
    elif spec.dp > 1:
        args["port"] = _free_port()
    return args


def _prefill_chunk(spec: EngineSpec) -> int | None:
    """Tokens of a prefill step; -1: all that are there, None: SGLang's choice.

    Its record of routes has room for one chunk, so there must be one.
    """
    if not spec.deterministic:
        return None
    return max(ROUTED_CHUNK_TOKENS, spec.context_tokens) if spec.routes else -1


def _free_port() -> int:
    """A ``port`` whose derived ports are free: with DP-attention SGLang talks over TCP.

    They lie below the range that the kernel gives out; hosts that search at the same time start at
    different places.
    """
    candidates = range(20000, 32000, 16)
    start = os.getpid() * 97 % len(candidates)
    for port in (*candidates[start:], *candidates[:start]):
        if all(_is_free(port + delta) for delta in DERIVED_PORTS):
            return port
    raise RuntimeError(
        f"no port between {candidates.start} and {candidates.stop} has the ports behind it free "
        "that DP-attention binds"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


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


class Batch(GenerateReqInput):
    """Requests that are sent together, each to the DP-attention group that it names."""

    def __init__(self, groups: Sequence[int] | None, **fields: Any) -> None:
        """``groups``: one per request; None where attention is not data parallel."""
        super().__init__(**fields)
        self._groups = groups

    def __getitem__(self, i: int) -> Any:
        request = super().__getitem__(i)
        if self._groups is not None:
            request.routed_dp_rank = self._groups[i]
        return request


def start_engine(spec: EngineSpec, *, fork: bool, obituary_fd: int, close_fds: list[int]) -> Engine:
    """Build the engine; blocks until its schedulers are ready, those of this node.

    On a node that is not its first it has schedulers only: nothing that could be asked.

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
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"  # else it waits here for their end
    kind = _ForkingEngine if fork else _SpawningEngine
    return kind(spec, obituary_fd, close_fds)


def process_pids(engine: Engine, spec: EngineSpec) -> dict[str, int]:
    """Name -> pid of the host, this process, and its children."""
    controller = ("data parallel controller",) if spec.dp > 1 else ()
    detokenizer = ("detokenizer",) if spec.node == 0 else ()
    names = ("host", *controller, *spec.scheduler_names, *detokenizer)
    return dict(zip(names, (os.getpid(), *engine.get_all_child_pids()), strict=True))


class _SpawningEngine(Engine):
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
        if needs_groups_together(spec):
            self.init_tokenizer_manager_func = keep_groups_together()
        super().__init__(**server_args(spec))

    @classmethod
    def _launch_subprocesses(cls, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        """On later nodes, do not ask for ports to be free that the first one binds."""
        if server_args.node_rank > 0:
            server_args.resolve_once()
            ports = PortArgs.init_new(server_args, dp_rank=0, worker_ports=[0])
            kwargs["port_args"] = ports
        return super()._launch_subprocesses(server_args, *args, **kwargs)

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: Any, port_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Name the file in /dev/shm, which nobody deletes, after the run's scratch folder."""
        if lent_name():
            port_args.instance_id = f"{lent_name()}-{port_args.instance_id}"
        return super()._launch_scheduler_processes(server_args, port_args, *args, **kwargs)


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
    note_process()
    if mp.get_start_method() == "fork":
        for fd in close_fds:
            os.close(fd)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if name == "scheduler":
        name = scheduler_name(tp_rank=args[3], stage=args[4])
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
    """One serialized payload per tp rank: the message is the name of an empty tensor.

    Args:
        messages: JSON texts, one per tp rank; all stages of a tp rank get the same.
    """
    from sglang.srt.utils import MultiprocessingSerializer

    return [
        MultiprocessingSerializer.serialize([(message, torch.empty(0))]) for message in messages
    ]
