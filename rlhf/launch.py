"""Start one process per rank on this machine, as torchrun does, without its pages of output."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from rlhf.dist.stop import EXIT_FAILED, EXIT_STOPPED


def launch(module: str, arguments: Sequence[str], num_ranks: int) -> int:
    """Run ``python -m module arguments`` on ``num_ranks`` ranks; returns the exit status.

    A rank that fails has said why in one line; all others are ended by the launcher.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0:  # it could not say so itself
                name = signal.Signals(-failure.exitcode).name
                print(f"stopped: rank {rank} was killed by {name}", file=sys.stderr, flush=True)
        status = min(failure.exitcode for failure in error.failures.values())
        return status if status > 0 else EXIT_FAILED
    except SignalException:
        return EXIT_STOPPED
    return 0


def default_ranks() -> int:
    """One per GPU of this machine, or one."""
    import torch

    return torch.cuda.device_count() or 1
