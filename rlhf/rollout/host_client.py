"""The rank's end of an engine: calls that answer, or raise within a second when it is dead.

One thread of the rank uses an :class:`EngineHost`; ``abort`` may come from any thread too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rlhf.rollout.channel import (
    Abort,
    Answered,
    BeginUpdate,
    CallLoader,
    Channel,
    Done,
    EndUpdate,
    Failed,
    Generate,
    Reply,
    Sleep,
    Wake,
)
from rlhf.rollout.engine import (
    Completion,
    EngineDied,
    EngineSpec,
    SampleRequest,
    check_requests,
)
from rlhf.rollout.engine_state import ALL_PARTS, EngineParts
from rlhf.rollout.host_process import HostProcess
from rlhf.rollout.node_host import SLICE_S, NodeHost

CALL_LIMIT_S = 120.0


class NoAnswerError(TimeoutError):
    """The host lives but did not answer a call in time."""


class EngineHost(NodeHost):
    """One engine, in processes of its own. Lives in the leader rank of the engine.

    Its host is that of the engine's first node, which speaks to the schedulers of all.
    """

    def __init__(
        self, spec: EngineSpec, channel: Channel, obituary: int, process: HostProcess
    ) -> None:
        """Use :meth:`launch`."""
        super().__init__(spec, channel, obituary, process)
        self._calls = 0
        self._update_call: int | None = None
        self._update_limit_s = 0.0
        self.late_s = 0.0  # see RolloutEngine

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
                    self._take_unasked(message)

    def _take_unasked(self, message: Reply) -> None:
        """Messages of calls that were given up are dropped; those of the open update count."""
        if isinstance(message, Failed) and message.call == self._update_call:
            raise RuntimeError(message.text)
