"""Signals that are seen while the main thread waits inside a library.

Python runs handlers between two bytecodes of the main thread, which may be hours away; the number
of a signal is written into a pipe at once.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from types import FrameType


class SignalPipe:
    """The signals that this process has got, in order."""

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        """Take over these signals. Main thread only; children of exec inherit nothing."""
        self.numbers = tuple(numbers)
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {n: signal.signal(n, _leave_to_the_pipe) for n in self.numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def take(self, timeout_s: float = 0.0) -> list[int]:
        """Signals since the last call; waits for the first at most this long. Any thread."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return []
        try:
            data = os.read(self.fd, 4096)
        except BlockingIOError:  # another thread was faster
            return []
        return [number for number in data if number in self.numbers]

    def close(self) -> None:
        """Hand the signals back. Main thread only."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)


def _leave_to_the_pipe(_number: int, _frame: FrameType | None) -> None:
    pass
