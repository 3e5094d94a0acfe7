"""The rank's end of the window that it shares with its engine process; words are in ``wire``."""

from __future__ import annotations

import base64
import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from rlhf.reshard.polling import POLL_EVERY_S, Poll
from rlhf.reshard.wire import HEAD_BYTES, TEXT_AT, End, Word, align

NAP_S = 1e-4
"""Sleep between two looks at a word."""
NOT_OPENED = -1
"""SEQUENCE before the receiver has opened the window."""
EXPANDABLE = "expandable_segments:True"


class ReceiverError(RuntimeError):
    """The engine's receiver failed or left an update early; carries its text."""


@contextmanager
def plain_segments() -> Iterator[None]:
    """Device memory that is allocated inside can be exported to another process.

    Importing an expandable segment needs pidfd_getfd, which containers deny
    (github.com/pytorch/pytorch/issues/165685). While they are off, the allocator serves no request
    from the expandable ones that it has; nothing is to be allocated at the same time elsewhere.
    """
    before = allocator_settings(torch._C)
    if EXPANDABLE not in before:
        yield
        return
    # the other settings are named again: none may fall back to its default
    plain = before.replace(EXPANDABLE, "expandable_segments:False")
    # versions of torch differ in the name
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or torch.cuda.memory._set_allocator_settings
    change(plain)
    try:
        yield
    finally:
        change(before)


def allocator_settings(library: Any, environ: Mapping[str, str] = os.environ) -> str:
    """Those in force; where ``library`` (torch._C of 2.11) cannot say, the environment's."""
    read = getattr(library, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        return str(read())
    return environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


class Window:
    """Two staging areas and the words that drive the receiver.

    The memfd has no name on disk: nothing is left behind when a process dies. The engine's process
    opens ``/proc/<pid of the rank>/fd/<fd>``.
    """

    def __init__(
        self, area_bytes: int, device: torch.device | str = "cpu", num_sums: int = 0
    ) -> None:
        """
        Args:
            area_bytes: size of one area.
            device: where the areas lie; the words are in host memory always.
            num_sums: room for the receiver's checksums; none: its updates can't be verified.

        Raises:
            OSError: no memory for it.
        """
        self.area_bytes = align(area_bytes)
        self.device = torch.device(device)
        on_host = self.device.type == "cpu"
        self.sums_at = HEAD_BYTES + (2 * self.area_bytes if on_host else 0)
        size = self.sums_at + num_sums * 8
        self.num_bytes = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("reshard-window")
        os.ftruncate(self.fd, self.num_bytes)
        self._memory = torch.from_file(
            f"/proc/self/fd/{self.fd}", shared=True, size=self.num_bytes, dtype=torch.uint8
        )
        self._words = self._memory[: len(Word) * 8].view(torch.int64)
        self.sums = self._memory[self.sums_at : size].view(torch.int64)
        """[num_sums] int64 in host memory; the receiver writes them in an update that verifies."""
        if on_host:
            self._areas = self._memory[HEAD_BYTES : self.sums_at]
        else:
            with plain_segments():
                self._areas = torch.empty(
                    2 * self.area_bytes, dtype=torch.uint8, device=self.device
                )
        self._sequence = 0
        self._write(Word.SEQUENCE, NOT_OPENED)

    @property
    def sequence(self) -> int:
        """Number of the last update that was begun."""
        return self._sequence

    @property
    def path(self) -> str:
        """Where another process of this machine finds the window."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def area(self, round_number: int) -> Tensor:
        """[area_bytes] uint8, the area of that round; a view."""
        begin = round_number % 2 * self.area_bytes
        return self._areas[begin : begin + self.area_bytes]

    def device_handle(self) -> str | None:
        """What the receiver needs to map areas in device memory; None: they are in the memfd."""
        if self.device.type == "cpu":
            return None
        return base64.b64encode(bytes(ForkingPickler.dumps(self._areas))).decode()

    def wait_opened(self, limit_s: float, poll: Poll) -> None:
        """Wait until the receiver has opened the window: later pipeline stages take their time.

        Raises:
            ReceiverError: the live parameters are not those of the plan.
            TimeoutError: it was silent for ``limit_s``.
        """
        self._wait(
            lambda: self._read(Word.SEQUENCE) != NOT_OPENED, "to open the window", limit_s, poll
        )
        self.check()

    def begin(self, limit_s: float, poll: Poll) -> int:
        """Clear the words for the next update and return its number.

        Raises:
            ReceiverError: the receiver is still inside the update before, or gave this one up.
        """
        previous, self._sequence = self._sequence, self._sequence + 1
        self._wait(
            lambda: self._read(Word.SEQUENCE) >= previous,
            f"to leave update {previous}",
            limit_s,
            poll,
            heed_error=False,  # that of the update before, which was raised then
        )
        if self._read(Word.SEQUENCE) >= self._sequence:
            self._raise_error(f"it left update {self._sequence} before that had begun")
        for word in (Word.POSTED, Word.DONE, Word.END, Word.ERROR, Word.BYTES, Word.REPLY):
            self._write(word, 0)
        self._write(Word.START, self._sequence)
        return self._sequence

    def post(self, num_rounds: int) -> None:
        """The first ``num_rounds`` rounds are in their areas; in a read, have been taken out."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._write(Word.POSTED, num_rounds)

    def wait_done(self, num_rounds: int, limit_s: float, poll: Poll, verb: str = "write") -> None:
        """Wait until the receiver has written, or read, ``num_rounds`` rounds.

        Raises:
            ReceiverError: it failed, with its text.
            TimeoutError: it was silent for ``limit_s``.
        """

        def done() -> bool:
            if self._read(Word.DONE) >= num_rounds:
                return True
            if self._read(Word.SEQUENCE) >= self._sequence:
                self._raise_error(f"it left the update after {self._read(Word.DONE)} rounds")
            return False

        self._wait(done, f"to {verb} round {num_rounds - 1}", limit_s, poll)

    def end(self, num_bytes: int, limit_s: float, poll: Poll) -> None:
        """Close the update: the receiver finishes the model and leaves its loop.

        Raises:
            ReceiverError: it failed, or copied another number of bytes than ``num_bytes``.
            TimeoutError: it was silent for ``limit_s``.
        """
        self._write(Word.END, End.COMPLETE)
        self._wait(
            lambda: self._read(Word.SEQUENCE) >= self._sequence, "to end the update", limit_s, poll
        )
        self.check()
        copied = self._read(Word.BYTES)
        if copied != num_bytes:
            raise ReceiverError(f"the engine copied {copied} bytes of this update's {num_bytes}")

    def abandon(self) -> None:
        """Tell the receiver to leave the update half written."""
        self._write(Word.END, End.ABANDON)

    def check(self) -> None:
        """
        Raises:
            ReceiverError: the receiver has reported an error.
        """
        if self._read(Word.ERROR):
            self._raise_error("")

    def reply(self) -> Any:
        """What the receiver answered to the last message with a reply, decoded; None if nothing."""
        length = self._read(Word.REPLY)
        return json.loads(zlib.decompress(self._text(length))) if length else None

    def close(self) -> None:
        """Give the name away; the memory lives as long as somebody maps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _read(self, word: Word) -> int:
        return int(self._words[word])

    def _write(self, word: Word, value: int) -> None:
        self._words[word] = value

    def _text(self, length: int) -> bytes:
        return bytes(self._memory[TEXT_AT : TEXT_AT + length].numpy())

    def _raise_error(self, otherwise: str) -> None:
        length = self._read(Word.ERROR)
        text = self._text(length).decode(errors="replace") if length else otherwise
        raise ReceiverError(f"the engine's receiver failed: {text}")

    def _wait(
        self,
        reached: Callable[[], bool],
        what: str,
        limit_s: float,
        poll: Poll,
        *,
        heed_error: bool = True,
    ) -> None:
        now = time.monotonic()
        deadline, next_poll = now + limit_s, now + POLL_EVERY_S
        while not reached():
            if heed_error:
                self.check()
            now = time.monotonic()
            if now > next_poll:
                poll()
                next_poll = now + POLL_EVERY_S
            if now > deadline:
                raise TimeoutError(f"waited {limit_s:g} s for the engine's receiver {what}")
            time.sleep(NAP_S)
