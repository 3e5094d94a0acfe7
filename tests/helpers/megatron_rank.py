"""Real Megatron models of any rank of any layout, in a process that stands for each in turn.

The groups are of torch's fake backend, and building a model asks no peer for anything. The
stand-ins of ``rlhf.platform.megatron_cpu`` must be in place.
"""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rlhf.dist.layout import TrainLayout
from rlhf.platform.fake_world import fake_groups


@contextmanager
def as_rank(layout: TrainLayout, rank: int) -> Iterator[None]:
    """Megatron's groups as ``rank`` sees them."""
    import torch.distributed as dist

    from rlhf.mcore import parallel

    try:
        with fake_groups(rank, layout.world):
            parallel.initialize(layout, timeout_s=60, seed=1)
        yield
    finally:
        parallel.shutdown()
        dist.destroy_process_group()


def frozen_model(folder: str, layout: TrainLayout) -> Any:
    """The model of the rank that this process stands for, bfloat16, nothing loaded."""
    from rlhf.config.schema import ModelSection, TrainSection
    from rlhf.mcore.model import build_model
    from rlhf.weights.model_shape import load_model_shape

    return build_model(
        load_model_shape(folder),
        layout,
        ModelSection(path=folder, dtype="bfloat16"),
        TrainSection(tp=layout.tp, sequence_parallel=layout.tp > 1),
        trainable=False,
    )


def in_megatron(work: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
    """``work(job)`` of each job in order, in one child with Megatron; errors come as values.

    Args:
        work: a function of a module (it travels by name); its value travels by pickle.
    """
    jobs = list(jobs)
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, work, jobs), daemon=True)
    process.start()
    theirs.close()
    try:
        for _ in jobs:
            yield mine.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Any, work: Callable[[Any], Any], jobs: list[Any]) -> None:
    import torch

    from rlhf.platform.megatron_cpu import install

    torch.set_num_threads(1)
    install()
    for job in jobs:
        try:
            pipe.send(work(job))
        except Exception:  # noqa: BLE001  the test of this job raises it
            pipe.send(RuntimeError(traceback.format_exc()))
