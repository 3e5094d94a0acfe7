"""Run movers of several ranks at once, in threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_threads(jobs: Sequence[Callable[[], Any]], timeout_s: float = 30) -> list[Any]:
    """Results of all jobs in order; the first exception by order is raised."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException | None] = [None] * len(jobs)

    def work(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except BaseException as error:  # noqa: BLE001  raised below
            errors[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for i, thread in enumerate(threads):
        thread.join(timeout_s)
        if thread.is_alive():
            raise TimeoutError(f"job {i} still runs after {timeout_s} s")
    for error in errors:
        if error is not None:
            raise error
    return results


def no_poll() -> None:
    """Nothing to look at while waiting."""
