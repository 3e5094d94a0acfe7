"""Two buffers on the device that data of the host passes through: copied in, changed, copied out.

On a GPU the three go side by side: while kernels work on one buffer, the other is copied out and
filled again. On a CPU one goes after the other, through the same two buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from rlhf.memory.chunks import NUM_BUFFERS, Chunk

Work = Callable[[Chunk, Tensor], None]
"""(chunk, its rows on the device [rows, length])."""


class Lanes(Protocol):
    """What is done inside waits for what it needs, and nothing else does."""

    def copying_in(self, buffer: int) -> AbstractContextManager[None]: ...

    def working(self, buffer: int) -> AbstractContextManager[None]: ...

    def copying_out(self, buffer: int) -> AbstractContextManager[None]: ...

    def finish(self) -> None:
        """The current stream goes on after all copies."""
        ...


class InOrder:
    """For a CPU."""

    def copying_in(self, buffer: int) -> AbstractContextManager[None]:
        return nullcontext()

    working = copying_out = copying_in

    def finish(self) -> None:
        return


class SideStreams:
    """For a GPU: one stream for each direction, beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._full = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._changed = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._empty = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        # the memory of the buffers may still be read by kernels that had it before
        self._in.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def copying_in(self, buffer: int) -> Iterator[None]:
        self._in.wait_event(self._empty[buffer])
        with torch.cuda.stream(self._in):
            yield
        self._full[buffer].record(self._in)

    @contextmanager
    def working(self, buffer: int) -> Iterator[None]:
        current = torch.cuda.current_stream()
        current.wait_event(self._full[buffer])
        yield
        self._changed[buffer].record(current)

    @contextmanager
    def copying_out(self, buffer: int) -> Iterator[None]:
        self._out.wait_event(self._changed[buffer])
        with torch.cuda.stream(self._out):
            yield
        self._empty[buffer].record(self._out)

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self._in)
        torch.cuda.current_stream().wait_stream(self._out)


def stream(
    host: Tensor, chunks: Sequence[Chunk], buffers: Sequence[Tensor], work: Work, *, keep: bool
) -> None:
    """``work`` on each chunk of ``host`` in turn, on the device.

    The copy of a chunk to the device is begun before ``work`` on the one before it.

    Args:
        host: [rows, elements].
        buffers: each [rows, its elements], on the device, of the current stream.
        keep: copy the changed rows back.
    """
    device = buffers[0].device
    lanes: Lanes = SideStreams(device) if device.type == "cuda" else InOrder()

    def parts(chunk: Chunk) -> tuple[Tensor, Tensor]:
        there = host[:, chunk.begin : chunk.begin + chunk.length]
        return there, buffers[chunk.buffer][:, : chunk.length]

    def copy_in(chunk: Chunk) -> None:
        with lanes.copying_in(chunk.buffer):
            _copy_rows(*parts(chunk))

    for number, chunk in enumerate(chunks):
        if number == 0:
            copy_in(chunk)
        if number + 1 < len(chunks):
            copy_in(chunks[number + 1])
        there, here = parts(chunk)
        with lanes.working(chunk.buffer):
            work(chunk, here)
        with lanes.copying_out(chunk.buffer):
            if keep:
                _copy_rows(here, there)
    lanes.finish()


def _copy_rows(source: Tensor, target: Tensor) -> None:
    """Row by row: each is contiguous, and a copy between device and host is then no kernel."""
    for from_row, to_row in zip(source, target, strict=True):
        to_row.copy_(from_row, non_blocking=True)
