"""A rank that trains nothing: phases, meetings and one thing that goes wrong.

``python -m tests.dist.stop_rank CASE RUN_DIR``, under any launcher. Rank 1, or the rank that ends
CASE, meets the fault in step 1; limits are seconds instead of minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from rlhf.dist.gate import PhaseGate
from rlhf.dist.groups import PhaseGroup, init_groups
from rlhf.dist.patience import Limits
from rlhf.dist.stop import EXIT_STOPPED, Stopper, StopRequested
from rlhf.dist.world import read_world
from rlhf.ending import end_failed
from rlhf.types import Phase

GRACE_S = 4.0
SHORT_S = 8.0
LONG_S = 600.0


def wait_for_ever() -> None:
    threading.Event().wait()


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


FAULTS: dict[str, Callable[[], None]] = {
    "hangs": wait_for_ever,
    "freezes": freeze,
    "dies": die,
    "leaves": leave,
}


def main() -> int:
    case, run_dir = sys.argv[1], Path(sys.argv[2])
    name, _, victim = case.partition("-")
    import torch

    world = read_world()
    stopper = Stopper(world.rank, GRACE_S)
    stopper.install()
    if name == "outlasts":  # imports and models take longer than a rank may be silent
        threading.Event().wait(1.2 * SHORT_S)
    init_groups(world, torch.device("cpu"), LONG_S)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limits = Limits(silence_s=SHORT_S, edge_s=SHORT_S, rollout_s=LONG_S)
    if name != "hangs":  # only the limit in question may act
        limits = Limits(silence_s=SHORT_S, edge_s=LONG_S, rollout_s=LONG_S)
    stopper.watch(lambda: dist.TCPStore(host, port, is_master=False), world.size, limits)
    group = PhaseGroup.create(world, LONG_S, stopper.meeting)
    gate = PhaseGate(group, stopper)
    try:
        for step in range(2):
            with gate.phase(Phase.ROLLOUT, step):
                group.gather(step)
            with gate.phase(Phase.UPDATE, step):
                if step == 1 and world.rank == int(victim or 1):
                    fault(name, stopper, run_dir)
            with gate.phase(Phase.PACK, step):
                pass
    except StopRequested as why:
        (run_dir / f"why{world.rank}").write_text(str(why), encoding="utf-8")
        stopper.close()
        return EXIT_STOPPED
    except RuntimeError as error:
        end_failed(str(run_dir), stopper, error)
    if name == "outlasts" and world.rank == 1:  # longer than a rank may be silent
        threading.Event().wait(1.5 * SHORT_S)
    stopper.close()
    return 0


def fault(name: str, stopper: Stopper, run_dir: Path) -> None:
    if name in FAULTS:
        FAULTS[name]()
    (run_dir / "reached").write_text(str(os.getpid()), encoding="utf-8")
    if name == "waits":  # the others are inside gloo; they hear of the signal all the same
        while not stopper.signal:
            threading.Event().wait(0.05)
    if name == "works":
        wait_for_ever()


if __name__ == "__main__":
    sys.exit(main())
