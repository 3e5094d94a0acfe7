"""The rank's end of an engine host: calls that answer, or raise within a second when it is dead.

One thread of the rank uses an :class:`EngineHost`; ``abort`` and ``kill`` may come from any thread.
Nothing runs in the background: messages are read while a call waits, or by :meth:`EngineHost.poll`.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rlhf.rollout.channel import (
    Abort,
    Answered,
    BeginUpdate,
    CallLoader,
    Channel,
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
)
from rlhf.rollout.engine import (
    Completion,
    EngineDied,
    EngineInfo,
    EngineSpec,
    SampleRequest,
    check_requests,
)
from rlhf.rollout.engine_state import ALL_PARTS, EngineParts
from rlhf.rollout.host_process import ForkedHost, HostProcess, SpawnedHost
from rlhf.rollout.lifeline import kill_pidfd, open_pidfd, read_obituary, wait_gone
from rlhf.rollout.zygote import Zygote

SLICE_S = 0.2
CLOSE_LIMIT_S = 10.0
CALL_LIMIT_S = 120.0


class NoAnswerError(TimeoutError):
    """The host lives but did not answer a call in time."""


class EngineHost:
    """One engine, in processes of its own. Lives in the leader rank of the engine.

    Every waiting call raises :class:`EngineDied` with the cause within a second of the death of
    the host, a scheduler or the detokenizer, and after ``spec.hang_limit_s`` without an answer.
    """

    def __init__(
        self, spec: EngineSpec, channel: Channel, obituary: int, process: HostProcess
    ) -> None:
        """Use :meth:`launch`."""
        self.spec = spec
        self._channel = channel
        self._obituary = obituary
        self._process = process
        self._inbox: deque[Reply] = deque()
        self._info: EngineInfo | None = None
        self._child_pidfds: list[int] = []
        self._watched: list[tuple[str, int]] = []
        self._calls = 0
        self._update_call: int | None = None
        self._update_limit_s = 0.0
        self._pinged_at: float | None = None
        self._heard_at = time.monotonic()
        self.late_s = 0.0  # see RolloutEngine
        self._died: str | None = None
        self._closed = False

    @classmethod
    def launch(cls, spec: EngineSpec, zygote: Zygote | None = None) -> EngineHost:
        """Start a host, forked by the node's zygote or, without one, spawned. Returns at once.

        Without a zygote it must be called from the rank's main thread: the kernel ends the host
        with the thread that started it.
        """
        mine, theirs = socket.socketpair()
        obituary, obituary_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        rank = os.pidfd_open(os.getpid())
        try:
            links = (theirs.fileno(), obituary_write, rank)
            process: HostProcess = (
                SpawnedHost(spec, *links) if zygote is None else ForkedHost(spec, *links, zygote)
            )
        finally:
            theirs.close()
            os.close(obituary_write)
            os.close(rank)
        return cls(spec, Channel(mine, spec.hang_limit_s), obituary, process)

    # ---------------------------------------------------------------- calls

    def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """Until the engine answers; ``timeout_s`` empty: the spec's start_timeout_s.

        Raises:
            EngineDied: it failed to start; at the time limit it is ended.
        """
        limit_s = self.spec.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while self._info is None:
            if time.monotonic() > deadline:
                self._bury(f"the engine was not ready within {limit_s:.0f} s")
            message = self._receive(SLICE_S, watch_hang=False)
            if isinstance(message, Ready):
                self._info = message.info
        if not self._child_pidfds:
            found = [(n, open_pidfd(p)) for n, p in self._info.pids.items() if n != "host"]
            self._watched = [(name, fd) for name, fd in found if fd is not None]
            self._child_pidfds = [fd for _, fd in self._watched]
        return self._info

    def generate(
        self,
        requests: Sequence[SampleRequest],
        on_completion: Callable[[Completion], None],
        timeout_s: float,
    ) -> list[Completion]:
        """All answers in request order; ``on_completion`` is called as each arrives.

        Deterministic engines repeat tokens and log-probabilities bit for bit when the same
        requests are given in the same order. :meth:`abort` makes running requests end early with
        status ABORTED and what they have. If ``on_completion`` raises, the rest is aborted.

        Raises:
            ValueError: a request that the engine cannot serve; nothing is sent.
            RuntimeError: the weights are not valid.
            TimeoutError: not all answers within ``timeout_s``; the rest is aborted.
            EngineDied: with the cause.
        """
        check_requests(requests, self.spec)
        if not requests:
            return []
        answers: dict[int, Completion] = {}

        def take(completion: Completion) -> None:
            answers[completion.key] = completion
            on_completion(completion)

        call = self._next_call()
        self._send(Generate(call, tuple(requests)))
        try:
            ended_s = self._wait(call, timeout_s, take)
            self.late_s = time.monotonic() - ended_s
        except EngineDied:
            raise
        except BaseException as error:
            with suppress(EngineDied):  # the first error counts; the next call tells of a death
                self.abort()
            if isinstance(error, NoAnswerError):
                raise TimeoutError(
                    f"{len(answers)} of {len(requests)} answers within {timeout_s} s; raise "
                    "rollout.timeout_s or lower rollout.sampling.max_new_tokens"
                ) from None
            raise
        return [answers[r.key] for r in requests]

    def abort(self) -> None:
        """Ask all running requests to end with what they have; returns at once.

        Callable from ``on_completion`` and from any thread, not from a signal handler.
        """
        self._send(Abort())

    def abort_quietly(self) -> None:
        """:meth:`abort` for who asks unasked: an engine that is gone or not ready is no error."""
        if self._info is not None and not self._closed:
            with suppress(EngineDied, RuntimeError):
                self.abort()

    def call_loader(self, messages: Sequence[dict[str, Any]], limit_s: float = 60.0) -> None:
        """One complete begin / loader call / end with one message per tp rank (open, table).

        Raises:
            RuntimeError: SGLang refused; errors of the receiver are in the window instead.
        """
        call = self._next_call()
        self._send(CallLoader(call, tuple(messages), limit_s))
        self._wait(call, limit_s + CALL_LIMIT_S)

    def begin_update(self, messages: Sequence[dict[str, Any]], limit_s: float) -> None:
        """Open an update: the loader call stays open in the engine. Returns at once.

        From here on the weights are invalid, until :meth:`end_update` has returned.
        :meth:`poll` raises if the engine refused or the call ended with an error.
        """
        self._begin_update(messages, limit_s, reads=False)

    def end_update(self, version: int) -> None:
        """Wait for the loader call to return and declare the weights valid as ``version``.

        Only for an update of which the window says that everything was written.

        Raises:
            RuntimeError: begin, loader or end failed; the weights stay invalid.
        """
        self._end_update(version)

    def abandon_update(self) -> None:
        """Wait for the loader call to return; the weights stay invalid."""
        self._end_update(None)

    def begin_read(self, messages: Sequence[dict[str, Any]], limit_s: float) -> None:
        """Like :meth:`begin_update`, for receivers that read weights and change none.

        Generate is refused until :meth:`end_read` has returned. Refused itself while the weights
        are invalid.
        """
        self._begin_update(messages, limit_s, reads=True)

    def end_read(self) -> None:
        """Wait for the loader call to return; the weights are as valid as they were.

        Raises:
            RuntimeError: begin, loader or end failed; the weights are invalid then.
        """
        self._end_update(None)

    def sleep(self, parts: EngineParts = ALL_PARTS) -> None:
        """Give up the memory of weights, KV cache or both. Generate is refused.

        On a CPU the KV cache keeps its memory. Without weights nothing can be read either.
        """
        call = self._next_call()
        self._send(Sleep(call, parts))
        self._wait(call, CALL_LIMIT_S)

    def wake(self, parts: EngineParts = ALL_PARTS) -> None:
        """Take the memory back; weights are invalid until an update has completed."""
        call = self._next_call()
        self._send(Wake(call, parts))
        self._wait(call, CALL_LIMIT_S)

    def poll(self) -> None:
        """Look, without waiting, whether the engine lives and the open update is well.

        Raises:
            EngineDied: with the cause.
            RuntimeError: the open update failed.
        """
        while (message := self._receive(0.0)) is not None:
            self._check_update(message)

    def death(self) -> EngineDied | None:
        """What is known of a death, from any thread; an engine that is closed has not died."""
        if self._closed:
            return None
        gone = [name for name, fd in self._watched if not self._closed and wait_gone([fd], 0.0)]
        return EngineDied(f"the rollout engine died: {', '.join(gone)} gone") if gone else None

    def kill(self) -> None:
        """SIGKILL to the host; the kernel ends its children. Never waits, from any thread."""
        self._process.kill()

    def close(self) -> None:
        """End all processes of the engine and wait until they are gone. Never raises EngineDied."""
        if self._closed:
            return
        self._closed = True
        if self._died is None:
            try:
                self._channel.send(Close())
            except OSError:
                self.kill()
            if not self._process.wait_gone(CLOSE_LIMIT_S):
                self.kill()
        self._release()

    # ---------------------------------------------------------------- inside

    def _begin_update(
        self, messages: Sequence[dict[str, Any]], limit_s: float, *, reads: bool
    ) -> None:
        self._update_call, self._update_limit_s = self._next_call(), limit_s
        self._send(BeginUpdate(self._update_call, tuple(messages), limit_s, reads))

    def _end_update(self, version: int | None) -> None:
        self._update_call = None
        call = self._next_call()
        self._send(EndUpdate(call, version))
        self._wait(call, self._update_limit_s + CALL_LIMIT_S)

    def _next_call(self) -> int:
        if self._info is None:
            self.wait_ready()
        self._calls += 1
        return self._calls

    def _send(self, message: Request) -> None:
        if self._closed:
            raise RuntimeError("the engine host is closed")
        if self._died is not None:
            raise EngineDied(self._died)
        try:
            self._channel.send(message)
        except TimeoutError:
            self._bury(f"the engine host took no message for {self.spec.hang_limit_s:.0f} s")
        except OSError:
            self._bury(None)

    def _wait(
        self,
        call: int,
        timeout_s: float,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> float:
        """Until the call is done; when it was for the host, on the monotonic clock."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(min(SLICE_S, max(0.0, deadline - time.monotonic())))
            match message:
                case Answered(call=answered, completion=completion) if answered == call:
                    assert on_completion is not None
                    on_completion(completion)
                case Done(call=done, at_s=at_s) if done == call:
                    return at_s
                case Failed(call=failed, text=text) if failed == call:
                    raise RuntimeError(text)
                case None:
                    if time.monotonic() > deadline:
                        raise NoAnswerError(f"no answer of the engine host within {timeout_s} s")
                case _:
                    self._check_update(message)

    def _check_update(self, message: Reply) -> None:
        """Messages of calls that were given up are dropped; those of the open update count."""
        if isinstance(message, Failed) and message.call == self._update_call:
            raise RuntimeError(message.text)

    def _receive(self, timeout_s: float, *, watch_hang: bool = True) -> Reply | None:
        """The next message, or None if none came within the time. Raises EngineDied."""
        if self._died is not None:
            raise EngineDied(self._died)
        if not self._inbox:
            self._inbox.extend(self._channel.receive(timeout_s))
        if not self._inbox and (self._channel.at_end or self._process.is_gone()):
            self._inbox.extend(self._channel.receive(0.0))  # what it said before it went
            if not self._inbox:
                self._bury(None)
        if self._inbox:
            self._heard_at = time.monotonic()
            message = self._inbox.popleft()
            if isinstance(message, Pong):
                self._pinged_at = None
            return message
        if watch_hang:
            self._watch_hang()
        return None

    def _watch_hang(self) -> None:
        """Ping a silent host; an unanswered ping is the end of it."""
        now, limit_s = time.monotonic(), self.spec.hang_limit_s
        if self._pinged_at is not None and now - self._pinged_at > limit_s:
            self._bury(f"the engine host did not answer for {limit_s:.0f} s")
        if self._pinged_at is None and now - self._heard_at > limit_s / 4:
            self._pinged_at = now
            self._heard_at = now
            self._send(Ping())

    def _bury(self, cause: str | None) -> NoReturn:
        """End what is left, find the cause, raise it."""
        if cause is not None:
            self._process.kill()
        self._process.wait_gone(1.0)
        lines = read_obituary(self._obituary)
        if cause is not None:
            lines.insert(0, cause)
        if not lines or not any("host" in line for line in lines):
            lines.append(self._process.describe())
        self._died = f"the rollout engine died: {'; '.join(lines)}"
        self._process.kill()
        wait_gone(self._child_pidfds, 1.0)
        raise EngineDied(self._died)

    def _release(self) -> None:
        if not wait_gone(self._child_pidfds, CLOSE_LIMIT_S):
            for fd in self._child_pidfds:
                kill_pidfd(fd)
        self._process.close()
        for fd in (*self._child_pidfds, self._obituary):
            os.close(fd)
        self._child_pidfds = []
        self._channel.close()
