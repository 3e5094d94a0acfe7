"""How messages travel between ranks: three verbs, three carriers.

:class:`DistTransport` serves gloo (host buffers) and NCCL (device buffers) through
``torch.distributed``; :class:`LocalTransport` connects threads of one process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.reshard.polling import POLL_EVERY_S, Poll

Parcel = tuple[Tensor, int]
"""(uint8 buffer, peer rank)."""


class TransportError(RuntimeError):
    """A message did not arrive."""

    def __init__(self, peer: int, direction: str, cause: str) -> None:
        super().__init__(f"{direction} rank {peer}: {cause}")
        self.peer = peer


class Transport(Protocol):
    """At most one message per peer and direction between ``start`` and ``wait``."""

    device: torch.device

    def start(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        """Begin to send and receive; the buffers belong to the transport until ``wait``."""
        ...

    def wait(self, limit_s: float, poll: Poll) -> None:
        """Return when all that was started has arrived.

        Raises:
            TransportError: a peer failed or is silent for ``limit_s``.
        """
        ...

    def close(self) -> None:
        """No more messages."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    peer: int
    direction: str
    work: Any


class DistTransport:
    """Point-to-point messages of a torch.distributed group, gloo or NCCL."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """With NCCL: one small all-reduce over ``group``, so that all ranks have joined it."""
        self.device = torch.device(device)
        self._group = group
        self._pending: list[_Pending] = []
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def start(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        if self._pending:
            raise RuntimeError(f"{len(self._pending)} messages are still on their way")
        if self.device.type == "cuda":
            self._start_batch(outgoing, incoming)
            return
        for buffer, peer in incoming:
            work = dist.irecv(buffer, peer, group=self._group)
            self._pending.append(_Pending(peer, "receiving from", work))
        for buffer, peer in outgoing:
            work = dist.isend(buffer, peer, group=self._group)
            self._pending.append(_Pending(peer, "sending to", work))

    def _start_batch(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        """NCCL needs both directions in one launch, or two ranks wait for each other."""
        ops = [dist.P2POp(dist.irecv, buffer, peer, self._group) for buffer, peer in incoming]
        ops += [dist.P2POp(dist.isend, buffer, peer, self._group) for buffer, peer in outgoing]
        if not ops:
            return
        peer = ops[0].peer
        for work in dist.batch_isend_irecv(ops):
            self._pending.append(_Pending(peer, "exchanging messages with", work))

    def wait(self, limit_s: float, poll: Poll) -> None:
        """Waits in a thread of its own: gloo's works can only be waited for, not asked."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        failure: list[TransportError] = []
        finished = threading.Event()

        def work() -> None:
            try:
                for item in pending:
                    try:
                        item.work.wait()
                    except RuntimeError as error:
                        failure.append(TransportError(item.peer, item.direction, str(error)))
                        return
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            finally:
                finished.set()

        threading.Thread(target=work, daemon=True, name="reshard-wire").start()
        deadline = time.monotonic() + limit_s
        while not finished.wait(POLL_EVERY_S):
            poll()
            if time.monotonic() > deadline:
                item = pending[0]
                raise TransportError(item.peer, item.direction, f"nothing for {limit_s:g} s")
        if failure:
            raise failure[0]

    def close(self) -> None:
        self._pending = []


class LocalHub:
    """Connects ranks that are threads of one process."""

    def __init__(self, world: int) -> None:
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (source, destination): queue.SimpleQueue()
            for source in range(world)
            for destination in range(world)
        }

    def transport(self, rank: int) -> LocalTransport:
        """The end of ``rank``."""
        return LocalTransport(rank, self._boxes)


class LocalTransport:
    """Copies through queues."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]]) -> None:
        self.device = torch.device("cpu")
        self._rank = rank
        self._boxes = boxes
        self._incoming: list[Parcel] = []

    def start(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        if self._incoming:
            raise RuntimeError(f"{len(self._incoming)} messages are still on their way")
        for buffer, peer in outgoing:
            self._boxes[self._rank, peer].put(buffer.clone())
        self._incoming = list(incoming)

    def wait(self, limit_s: float, poll: Poll) -> None:
        deadline = time.monotonic() + limit_s
        incoming, self._incoming = self._incoming, []
        for buffer, peer in incoming:
            message = self._take(peer, deadline, limit_s, poll)
            if message.numel() != buffer.numel():
                raise TransportError(
                    peer,
                    "receiving from",
                    f"{message.numel()} bytes came, {buffer.numel()} were due",
                )
            buffer.copy_(message)

    def close(self) -> None:
        self._incoming = []

    def _take(self, peer: int, deadline: float, limit_s: float, poll: Poll) -> Tensor:
        while True:
            try:
                return self._boxes[peer, self._rank].get(timeout=POLL_EVERY_S)
            except queue.Empty:
                poll()
                if time.monotonic() > deadline:
                    raise TransportError(
                        peer, "receiving from", f"nothing for {limit_s:g} s"
                    ) from None
