"""Run a module-level function on several gloo ranks and get their results back."""

from __future__ import annotations

import datetime
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _worker(
    rank: int, world: int, port: int, conn: Any, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=limit
    )
    try:
        conn.send(("ok", fn(rank, world, *args)))
    except BaseException:  # noqa: BLE001  (the parent raises it)
        conn.send(("error", traceback.format_exc()))
    finally:
        conn.close()
        os._exit(0)


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """``fn(rank, world, *args)`` on ``world`` spawned processes with a default gloo group.

    Returns the results in rank order. The first traceback of a rank is raised here; processes
    that are still running at the time limit are killed.
    """
    import multiprocessing as mp
    import multiprocessing.connection

    import torch

    context = mp.get_context("spawn")
    # The store is this process's: a port that is looked up and given back may be taken by others.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for rank in range(world):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(rank, world, store.port, theirs, fn, args))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"ranks {sorted(set(range(world)) - set(results))} not done in {timeout_s} s"
                )
            waiting = [pipes[r] for r in range(world) if r not in results]
            for pipe in mp.connection.wait(waiting, timeout=left):
                rank = pipes.index(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died without a result") from None
                if kind == "error":
                    raise RuntimeError(f"rank {rank}:\n{value}")
                results[rank] = value
    finally:
        for process in processes:
            if len(results) < world:
                process.kill()
            process.join(10)
    return [results[r] for r in range(world)]
