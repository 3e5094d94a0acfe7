"""Serves one rank's requests to one SGLang engine, on the engine's own asyncio loop.

The loop always runs, so completions stream back one by one, an abort works during a generation, a
ping is answered at any time, and an update stays open while the rank drives its rounds.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

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
from rlhf.rollout.engine import (
    RESERVED_TOKENS,
    Completion,
    EngineInfo,
    EngineSpec,
    SampleRequest,
)
from rlhf.rollout.engine_state import Use
from rlhf.rollout.host_weights import EngineWeights
from rlhf.rollout.lifeline import EXIT_DIED, Links, describe_exit, peek_exit, write_obituary
from rlhf.rollout.routes import decode_routes
from rlhf.rollout.sglang_engine import Batch, process_pids, sampling_params
from rlhf.types import Status

if TYPE_CHECKING:
    import numpy as np

ABORT_EVERY_S = 0.2
Groups = Mapping[tuple[int, ...], int]
"""Prompt -> DP-attention group."""
STATUS = {"stop": Status.STOPPED, "length": Status.LENGTH, "abort": Status.ABORTED}


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
        self._weights = EngineWeights(self._manager, spec, self._die)
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = threading.Event()

    async def run(self, started: float) -> None:
        """Until the rank closes or is gone."""
        self._manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._die, "a child reported a failure")
        loop.add_signal_handler(signal.SIGTERM, self._die, "engine host: SIGTERM")
        pids = process_pids(self._engine, self._spec)
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
                self._run(self._answer(call, self._weights.end(version)))
            case CallLoader(call=call, messages=messages, limit_s=limit_s):
                work = self._when_idle("loader call", self._weights.call(messages, limit_s))
                self._run(self._answer(call, work))
            case Sleep(call=call, parts=parts):
                work = self._when_idle("sleep", self._weights.sleep(parts))
                self._run(self._answer(call, work))
            case Wake(call=call, parts=parts):
                self._run(self._answer(call, self._weights.wake(parts)))

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
            self._send(Done(call, time.monotonic()))

    def _send(self, message: Reply) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    # ---------------------------------------------------------------- generation

    async def _generate(self, message: Generate, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            if self._aborting is None:
                raise RuntimeError("a generation is running; abort it or wait for it first")
            await asyncio.wait({before})
        self._weights.check(Use.GENERATE)
        # Answers to one prompt go to one DP-attention group: each has a prefix cache of its own.
        prompts = dict.fromkeys(r.token_ids for r in message.requests)
        groups = {prompt: i % self._spec.dp for i, prompt in enumerate(prompts)}
        if self._spec.prefix_cache:
            await self._cache_prompts(message, groups)
        async for index, out in self._finished(message.requests, groups, f"{message.call}"):
            request = message.requests[index]
            completion = self._completion(request, out)
            self._send(Answered(message.call, completion))

    async def _cache_prompts(self, message: Generate, groups: Groups) -> None:
        """Compute each prompt that several requests share once; they then find it in the cache.

        Admitted together they would all compute it. A deterministic engine does so with every
        prompt: all requests then start from a cached one, whatever was asked before.
        """
        asked = [r for r in message.requests if not r.prompt_logprobs]
        count = Counter(r.token_ids for r in asked)
        fewest = 1 if self._spec.deterministic else 2
        first = {r.token_ids: r for r in asked if count[r.token_ids] >= fewest}
        once = [replace(r, max_new_tokens=1) for r in first.values()]
        if once:
            async for _ in self._finished(once, groups, f"{message.call}.prompt"):
                pass

    async def _finished(
        self, requests: Sequence[SampleRequest], groups: Groups, name: str
    ) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(position, answer) of each request as it ends.

        One batch is one message to the scheduler: a share is admitted whole, before the next
        step is scheduled, so the batches that are run depend on the requests alone. (With
        DP-attention each request is a message of its own: then tokens repeat, and
        log-probabilities to rounding.)
        """
        batch = Batch(
            [groups[r.token_ids] for r in requests] if self._spec.dp > 1 else None,
            input_ids=[list(r.token_ids) for r in requests],
            sampling_params=[sampling_params(r, self._spec.deterministic) for r in requests],
            rid=[f"{name}.{i}" for i in range(len(requests))],
            return_logprob=True,
            logprob_start_len=[0 if r.prompt_logprobs else -1 for r in requests],
            return_routed_experts=self._spec.routes,
            stream=True,
        )
        async with aclosing(self._manager.generate_request(batch, None)) as outputs:
            async for out in outputs:
                if out["meta_info"]["finish_reason"] is not None:
                    yield out["index"], out

    def _completion(self, request: SampleRequest, out: dict[str, Any]) -> Completion:
        key = request.key
        reason = out["meta_info"]["finish_reason"]
        if reason.get("status_code") is not None:
            raise RuntimeError(f"request {key} was refused by SGLang: {reason.get('message')}")
        token_ids = list(out["output_ids"])
        logprobs = [entry[0] for entry in out["meta_info"].get("output_token_logprobs") or ()]
        if reason["type"] == "abort":  # the last step of an aborted request may be half reported
            num_tokens = min(len(token_ids), len(logprobs))
            token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
        routes = self._routes(out, len(request.token_ids) + len(token_ids) - 1)
        of_prompt = _prompt_logprobs(request, out)
        if len(token_ids) != len(logprobs):
            raise RuntimeError(
                f"request {key}: {len(token_ids)} tokens but {len(logprobs)} log-probabilities"
            )
        if not all(map(isfinite, [*logprobs, *(of_prompt or ())])):
            raise RuntimeError(
                f"request {key}: the engine gave a log-probability that is not finite; "
                "its weights or its cache hold NaN"
            )
        status = STATUS[reason["type"]]
        version = self._weights.state.version
        return Completion(key, token_ids, logprobs, status, version, routes, of_prompt)

    def _routes(self, out: dict[str, Any], num_tokens: int) -> np.ndarray | None:
        """Those of the first ``num_tokens`` tokens; an aborted request may have more."""
        if not self._spec.routes:
            return None
        assert self._spec.routed is not None
        text = out["meta_info"].get("routed_experts")
        if text is None:  # aborted before it ran
            return None
        routes = decode_routes(text, self._spec.routed)
        if len(routes) < num_tokens:
            raise RuntimeError(f"the engine gave routes of {len(routes)} tokens of {num_tokens}")
        return routes[:num_tokens]

    async def _abort(self, generation: asyncio.Task[None]) -> None:
        # Asked again until it holds: requests may still be on their way to the scheduler.
        while not generation.done():
            self._manager.abort_request(abort_all=True)
            await asyncio.wait({generation}, timeout=ABORT_EVERY_S)
        self._aborting = None

    # ---------------------------------------------------------------- weights

    def _begin_update(self, message: BeginUpdate) -> None:
        def tell(text: str) -> None:
            self._send(Failed(message.call, text))

        if busy := self._busy():
            tell(f"RuntimeError: update refused: {busy}")
        elif message.reads and (refusal := self._weights.refusal(Use.READ)):
            tell(f"RuntimeError: {refusal}")
        else:
            self._weights.begin(message.messages, message.limit_s, tell, reads=message.reads)

    async def _when_idle(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        if busy := self._busy():
            work.close()
            raise RuntimeError(f"{what} refused: {busy}")
        await work

    def _busy(self) -> str:
        if self._weights.is_busy:
            return "an update is open; end it first"
        if self._generation is not None and not self._generation.done() and not self._aborting:
            return "a generation is running; abort it or wait for it first"
        return ""

    # ---------------------------------------------------------------- watching

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
            while self._weights.loading:
                await asyncio.sleep(limit_s / 4)
            try:
                await asyncio.wait_for(self._manager.get_internal_state(), limit_s)
            except TimeoutError:
                if not self._weights.loading:
                    self._die(f"a scheduler did not answer for {limit_s:.0f} s")

    def _die(self, cause: str) -> NoReturn:
        """End this process; the kernel ends its children."""
        write_obituary(self._links.obituary, cause)
        os._exit(EXIT_DIED)


def _prompt_logprobs(request: SampleRequest, out: dict[str, Any]) -> list[float] | None:
    """Of all tokens but the first, for which there is none."""
    if not request.prompt_logprobs:
        return None
    found = [entry[0] for entry in out["meta_info"].get("input_token_logprobs") or ()][1:]
    if len(found) != len(request.token_ids) - 1:
        raise RuntimeError(
            f"request {request.key}: {len(found)} log-probabilities for a prompt of "
            f"{len(request.token_ids)} tokens"
        )
    return found
