"""The engine host: a process of its own that holds one SGLang engine for a rank.

A failing scheduler sends SIGQUIT to its parent, which then kills its whole process tree. That tree
is this process and its children, never the rank: an engine's death is an event that the rank
handles. The host owns SGLang's asyncio loop, which always runs, so that completions stream back one
by one, an abort works during a generation, and a ping is answered at any time.

Weights are invalid until an update has completed; until then, while the engine sleeps, and after
an update that failed, the host refuses to generate.

Started by the node's zygote (fork) or by ``python -m rlhf.rollout.host`` (spawn).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from rlhf.rollout.channel import (
    LENGTH,
    Abort,
    Answered,
    BeginUpdate,
    CallLoader,
    Close,
    Done,
    EndUpdate,
    Failed,
    Generate,
    Ping,
    Pong,
    Ready,
    Reply,
    Request,
    Sleep,
    Wake,
    frame,
    unframe,
)
from rlhf.rollout.engine import RESERVED_TOKENS, Completion, EngineInfo, EngineSpec
from rlhf.rollout.lifeline import (
    describe_exit,
    die_with_parent,
    name_process,
    peek_exit,
    write_obituary,
)
from rlhf.types import Status

EXIT_DIED = 70
ABORT_EVERY_S = 0.2
LOADER_GRACE_S = 10.0
"""Time that the loader has, after its own limit, to return."""

STATUS = {"stop": Status.STOPPED, "length": Status.LENGTH, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True)
class Links:
    """Descriptors that tie a host to its rank."""

    channel: int
    obituary: int
    rank: int
    """pidfd of the rank."""


def serve(spec: EngineSpec, links: Links, *, fork: bool) -> NoReturn:
    """The whole life of a host. Never returns; the exit status is 0 after a close."""
    started = time.perf_counter()
    name_process("rlhf-engine")
    try:
        from rlhf.rollout.sglang_engine import start_engine

        engine = start_engine(
            spec,
            fork=fork,
            obituary_fd=links.obituary,
            close_fds=[links.channel, links.obituary, links.rank],
        )
        host = Host(engine, spec, links)
        engine.loop.run_until_complete(host.run(started))
        host.closing.set()
        engine.shutdown()
        for child in mp.active_children():
            child.join(1.0)  # no zombies for whoever inherits them
    except BaseException as error:  # noqa: BLE001  (the process ends here; the rank is told why)
        import traceback

        traceback.print_exc()
        write_obituary(links.obituary, f"engine host: {type(error).__name__}: {error}")
        os._exit(EXIT_DIED)
    os._exit(0)


class Host:
    """Serves one rank's requests on the engine's loop."""

    def __init__(self, engine: Any, spec: EngineSpec, links: Links) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._spec = spec
        self._links = links
        self._writer: asyncio.StreamWriter | None = None
        self._generation: asyncio.Task[None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._update: asyncio.Task[None] | None = None
        self._loading = False
        self._version = -1
        self._invalid = "no update has completed yet"
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = threading.Event()

    async def run(self, started: float) -> None:
        """Until the rank closes or is gone."""
        self._manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._die, "a child reported a failure")
        loop.add_signal_handler(signal.SIGTERM, self._die, "engine host: SIGTERM")
        pids = self._pids()
        self._watch_processes(pids)
        sock = socket.socket(fileno=self._links.channel)
        reader, self._writer = await asyncio.open_unix_connection(sock=sock)
        kv_tokens = await self._kv_tokens()
        self._send(Ready(EngineInfo(pids, kv_tokens, time.perf_counter() - started)))
        self._run(self._watch_scheduler())
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                message = unframe(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return
            if isinstance(message, Close):
                return
            self._take(message)

    def _take(self, message: Request) -> None:
        match message:
            case Ping():
                self._send(Pong())
            case Abort():
                if self._generation is not None and self._aborting is None:
                    self._aborting = self._run(self._abort(self._generation))
            case Generate(call=call):
                work = self._generate(message, self._generation)
                self._generation = self._run(self._answer(call, work))
            case BeginUpdate():
                self._begin_update(message)
            case EndUpdate(call=call, version=version):
                self._run(self._answer(call, self._end_update(version)))
            case CallLoader(call=call, messages=messages, limit_s=limit_s):
                self._run(self._answer(call, self._call_loader(messages, limit_s)))
            case Sleep(call=call):
                self._run(self._answer(call, self._sleep()))
            case Wake(call=call):
                self._run(self._answer(call, self._wake()))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  (raised in the rank)
            self._send(Failed(call, f"{type(error).__name__}: {error}"))
        else:
            self._send(Done(call))

    def _send(self, message: Reply) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    # ---------------------------------------------------------------- generation

    async def _generate(self, message: Generate, before: asyncio.Task[None] | None) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from rlhf.rollout.sglang_engine import sampling_params

        if before is not None and not before.done():
            if self._aborting is None:
                raise RuntimeError("a generation is running; abort it or wait for it first")
            await asyncio.wait({before})
        if self._invalid:
            raise RuntimeError(
                f"generate refused: engine weights are not valid ({self._invalid}); "
                "complete an update first"
            )
        # One batch is one message to the scheduler: a share is admitted whole, before the next
        # step is scheduled, so the batches that are run depend on the requests alone.
        batch = GenerateReqInput(
            input_ids=[list(r.token_ids) for r in message.requests],
            sampling_params=[
                sampling_params(r, self._spec.deterministic) for r in message.requests
            ],
            rid=[f"{message.call}.{i}" for i in range(len(message.requests))],
            return_logprob=True,
            stream=True,
        )
        async with aclosing(self._manager.generate_request(batch, None)) as outputs:
            async for out in outputs:
                if out["meta_info"]["finish_reason"] is not None:
                    key = message.requests[out["index"]].key
                    self._send(Answered(message.call, self._completion(key, out)))

    def _completion(self, key: int, out: dict[str, Any]) -> Completion:
        reason = out["meta_info"]["finish_reason"]
        if reason.get("status_code") is not None:
            raise RuntimeError(f"request {key} was refused by SGLang: {reason.get('message')}")
        token_ids = list(out["output_ids"])
        logprobs = [entry[0] for entry in out["meta_info"].get("output_token_logprobs") or ()]
        if reason["type"] == "abort":  # the last step of an aborted request may be half reported
            num_tokens = min(len(token_ids), len(logprobs))
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        if len(token_ids) != len(logprobs):
            raise RuntimeError(
                f"request {key}: {len(token_ids)} tokens but {len(logprobs)} log-probabilities"
            )
        if not all(map(isfinite, logprobs)):
            raise RuntimeError(
                f"request {key}: the engine gave a log-probability that is not finite; "
                "its weights or its cache hold NaN"
            )
        return Completion(key, token_ids, logprobs, STATUS[reason["type"]], self._version)

    async def _abort(self, generation: asyncio.Task[None]) -> None:
        # Asked again until it holds: requests may still be on their way to the scheduler.
        while not generation.done():
            self._manager.abort_request(abort_all=True)
            await asyncio.wait({generation}, timeout=ABORT_EVERY_S)
        self._aborting = None

    # ---------------------------------------------------------------- weights

    def _begin_update(self, message: BeginUpdate) -> None:
        async def update() -> None:
            try:
                await self._load(message.messages, message.limit_s)
            except Exception as error:
                self._invalid = f"the last update failed: {error}"
                self._send(Failed(message.call, f"{type(error).__name__}: {error}"))
                raise

        busy = self._busy()
        if busy:
            self._send(Failed(message.call, f"RuntimeError: update refused: {busy}"))
            return
        self._invalid = "an update is open"
        self._update = self._run(update())

    async def _end_update(self, version: int | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("end_update without begin_update")
        await update
        if version is None:
            self._invalid = "the last update was abandoned"
            return
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version))
        )
        self._version, self._invalid = version, ""

    async def _call_loader(self, messages: tuple[dict[str, Any], ...], limit_s: float) -> None:
        if busy := self._busy():
            raise RuntimeError(f"loader call refused: {busy}")
        await self._load(messages, limit_s)

    def _busy(self) -> str:
        if self._update is not None or self._loading:
            return "an update is open; end it first"
        if self._generation is not None and not self._generation.done() and not self._aborting:
            return "a generation is running; abort it or wait for it first"
        return ""

    async def _load(self, messages: tuple[dict[str, Any], ...], limit_s: float) -> None:
        """One begin, one loader call in every scheduler, one end; prefix cache flushed."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        from rlhf.rollout.sglang_engine import loader_payloads

        if len(messages) != self._spec.tp:
            raise ValueError(
                f"{len(messages)} loader messages for {self._spec.tp} tensor parallel ranks"
            )
        self._loading = True
        try:
            _check(
                "begin_weight_update",
                await self._manager.begin_weight_update(
                    BeginWeightUpdateReqInput(selector="target")
                ),
            )
            call = self._manager.update_weights_from_tensor(
                UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=loader_payloads([json.dumps(m) for m in messages]),
                    load_format=self._spec.receiver,
                    flush_cache=True,
                    selector="target",
                )
            )
            limit_s += LOADER_GRACE_S
            try:
                loaded = await asyncio.wait_for(call, limit_s)
            except TimeoutError:
                self._die(f"a scheduler did not return from the loader within {limit_s:.0f} s")
            ended = await self._manager.end_weight_update(EndWeightUpdateReqInput())
            _check("loader", loaded)
            _check("end_weight_update", ended)
        finally:
            self._loading = False

    async def _sleep(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if busy := self._busy():
            raise RuntimeError(f"sleep refused: {busy}")
        self._invalid = "the engine sleeps"
        if self._spec.device == "cpu":
            await self._load(({"op": "sleep"},) * self._spec.tp, limit_s=60.0)
        else:
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    async def _wake(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if self._invalid != "the engine sleeps":
            return
        self._invalid = "no update has completed since the engine slept"
        if self._spec.device != "cpu":
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())

    # ---------------------------------------------------------------- watching

    def _pids(self) -> dict[str, int]:
        *schedulers, detokenizer = self._engine.get_all_child_pids()
        pids = {"host": os.getpid()}
        pids |= {f"scheduler tp{i}": pid for i, pid in enumerate(schedulers)}
        return pids | {"detokenizer": detokenizer}

    async def _kv_tokens(self) -> int:
        state = (await self._manager.get_internal_state())[0]
        num_tokens = int(state["memory_usage"]["token_capacity"])
        need = self._spec.context_tokens + RESERVED_TOKENS
        if num_tokens < need:
            raise RuntimeError(
                f"the KV cache holds {num_tokens} tokens, one full context needs {need}; raise "
                "rollout.mem_fraction or rollout.kv_tokens, or shorten prompts and answers"
            )
        return num_tokens

    def _watch_processes(self, pids: dict[str, int]) -> None:
        """A thread of its own: it works while the loop, or SGLang on it, does not."""
        children = {os.pidfd_open(pid): (name, pid) for name, pid in pids.items() if name != "host"}

        def watch() -> None:
            poller = select.poll()
            for fd in (self._links.rank, *children):
                poller.register(fd, select.POLLIN)
            fd = poller.poll()[0][0]
            if fd == self._links.rank:
                os._exit(0)
            if self.closing.is_set():
                return
            name, pid = children[fd]
            self._die(f"{name} (pid {pid}) {describe_exit(peek_exit(fd))}")

        threading.Thread(target=watch, name="watch-processes", daemon=True).start()

    async def _watch_scheduler(self) -> None:
        """A scheduler that hangs is alive for the kernel: ask it something now and then.

        Not during a loader call, which has a limit of its own.
        """
        limit_s = self._spec.hang_limit_s
        while True:
            await asyncio.sleep(limit_s / 4)
            while self._loading:
                await asyncio.sleep(limit_s / 4)
            try:
                await asyncio.wait_for(self._manager.get_internal_state(), limit_s)
            except TimeoutError:
                if not self._loading:
                    self._die(f"a scheduler did not answer for {limit_s:.0f} s")

    def _die(self, cause: str) -> NoReturn:
        """End this process; the kernel ends its children."""
        write_obituary(self._links.obituary, cause)
        os._exit(EXIT_DIED)


def _check(step: str, result: tuple[bool, str]) -> None:
    ok, text = result
    if not ok:
        raise RuntimeError(f"{step} failed: {text}")


def spec_from_json(text: str) -> EngineSpec:
    """The inverse of ``json.dumps(dataclasses.asdict(spec))``."""
    fields = json.loads(text)
    return EngineSpec(**fields | {"cores": tuple(fields["cores"])})


def main() -> NoReturn:
    """``python -m rlhf.rollout.host CHANNEL OBITUARY RANK_PIDFD RANK_PID SPEC``."""
    channel, obituary, rank, rank_pid = map(int, sys.argv[1:5])
    die_with_parent(rank_pid)
    serve(spec_from_json(sys.argv[5]), Links(channel, obituary, rank), fork=False)


if __name__ == "__main__":
    main()
