"""The engine host on every node of an engine but its first: holds schedulers, and watches them.

SGLang's schedulers of all nodes get their requests from the first node's, so this process is asked
nothing: it says that it is ready, answers pings, and ends with its children, its rank or a close.
One thread, one poll.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from rlhf.rollout.channel import Channel, Close, Ping, Pong, Ready
from rlhf.rollout.engine import EngineInfo, EngineSpec
from rlhf.rollout.lifeline import EXIT_DIED, Links, describe_exit, peek_exit, write_obituary
from rlhf.rollout.sglang_engine import process_pids


class Follower:
    """Stands for its node's part of the engine."""

    def __init__(self, engine: Any, spec: EngineSpec, links: Links) -> None:
        """``engine``: SGLang's, without a tokenizer manager."""
        self._engine = engine
        self._pids = process_pids(engine, spec)
        self._links = links
        self._channel = Channel(socket.socket(fileno=links.channel), spec.hang_limit_s)

    def run(self, started: float) -> None:
        """Until the rank closes; does not return if a child ends before, or the rank is gone."""
        signal.signal(signal.SIGQUIT, lambda *_: self._die("a child reported a failure"))
        signal.signal(signal.SIGTERM, lambda *_: self._die("engine host: SIGTERM"))
        children = {os.pidfd_open(p): (n, p) for n, p in self._pids.items() if n != "host"}
        poller = select.poll()
        for fd in (self._links.rank, self._channel.fileno(), *children):
            poller.register(fd, select.POLLIN)
        self._channel.send(Ready(self._info(started)))
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._links.rank in ready:
                os._exit(0)
            if self._channel.fileno() in ready and self._is_closed():
                return
            for fd in ready & set(children):
                name, pid = children[fd]
                self._die(f"{name} (pid {pid}) {describe_exit(peek_exit(fd))}")

    def _info(self, started: float) -> EngineInfo:
        facts = self._engine._scheduler_init_result.scheduler_infos[0]
        kv_tokens = int(facts["max_total_num_tokens"])
        return EngineInfo(self._pids, kv_tokens, time.perf_counter() - started)

    def _is_closed(self) -> bool:
        """Read what the rank has sent."""
        for message in self._channel.receive(0.0):
            if isinstance(message, Ping):
                self._channel.send(Pong())
            elif isinstance(message, Close):
                return True
            else:
                raise TypeError(f"{type(message).__name__} is for the engine's first node")
        return self._channel.at_end

    def _die(self, cause: str) -> NoReturn:
        """End this process; the kernel ends its children."""
        write_obituary(self._links.obituary, cause)
        os._exit(EXIT_DIED)
