"""Messages between a rank and its engine host, and how they are framed on the socket.

A frame is a 4-byte big-endian length and a pickled message. Both ends are ours and the socket is a
private pair, so pickle is safe here. ``call`` numbers a request of the rank; answers carry it, so
that answers to a call that was given up are recognised and dropped.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any

from rlhf.rollout.engine import Completion, EngineInfo, SampleRequest
from rlhf.rollout.engine_state import EngineParts

LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Generate:
    call: int
    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """All running requests end with what they have."""


@dataclass(frozen=True, slots=True)
class CallLoader:
    """A complete begin / loader / end with one message for each tp rank."""

    call: int
    messages: tuple[dict[str, Any], ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class BeginUpdate:
    """Open an update; answered by :class:`Failed` only, when it ends too early."""

    call: int
    messages: tuple[dict[str, Any], ...]
    limit_s: float
    reads: bool = False
    """The weights are read and stay what they are."""


@dataclass(frozen=True, slots=True)
class EndUpdate:
    """Wait for the loader; ``version`` None abandons the update: weights stay invalid."""

    call: int
    version: int | None


@dataclass(frozen=True, slots=True)
class Sleep:
    call: int
    parts: EngineParts


@dataclass(frozen=True, slots=True)
class Wake:
    call: int
    parts: EngineParts


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Request = Generate | Abort | CallLoader | BeginUpdate | EndUpdate | Sleep | Wake | Ping | Close


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Answered:
    call: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Done:
    call: int
    at_s: float
    """When, on the monotonic clock of the node."""


@dataclass(frozen=True, slots=True)
class Failed:
    call: int
    text: str


@dataclass(frozen=True, slots=True)
class Pong:
    pass


Reply = Ready | Answered | Done | Failed | Pong


def frame(message: Request | Reply) -> bytes:
    """Length and pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


def unframe(body: bytes) -> Any:
    """The message of a frame's body."""
    return pickle.loads(body)


class Channel:
    """An end without an event loop: sends may come from any thread, one thread receives."""

    def __init__(self, sock: socket.socket, send_limit_s: float) -> None:
        """``send_limit_s``: a peer that takes nothing for so long counts as gone."""
        self._socket = sock
        self._socket.settimeout(send_limit_s)
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self.at_end = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Request | Reply) -> None:
        """Raises OSError (TimeoutError included) if the peer is gone or takes nothing."""
        with self._lock:
            self._socket.sendall(frame(message))

    def receive(self, timeout_s: float) -> list[Any]:
        """Messages that are there, waiting up to ``timeout_s`` for the first bytes.

        Sets ``at_end`` when the peer has closed and everything was read.
        """
        if self.at_end or not self._readable(timeout_s):
            return []
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        self.at_end = not data
        self._buffer += data
        return self._complete()

    def _readable(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def _complete(self) -> list[Any]:
        messages = []
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, at)
            if len(self._buffer) - at - LENGTH.size < length:
                break
            body = bytes(self._buffer[at + LENGTH.size : at + LENGTH.size + length])
            messages.append(unframe(body))
            at += LENGTH.size + length
        del self._buffer[:at]
        return messages

    def close(self) -> None:
        self._socket.close()
