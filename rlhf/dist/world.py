"""Which rank am I, of how many: read from torchrun's or srun's environment, never guessed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """True under torchrun, or under srun with one task per rank and MASTER_ADDR set."""
    return "RANK" in environ or ("SLURM_PROCID" in environ and "MASTER_ADDR" in environ)


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """The world that the launcher describes.

    Raises:
        RuntimeError: variables are missing or contradict one another.
    """
    names = TORCHRUN if "RANK" in environ else SRUN
    missing = [n for n in (*names, "MASTER_ADDR", "MASTER_PORT") if n not in environ]
    if missing:
        raise RuntimeError(
            f"not started by torchrun or srun: {', '.join(missing)} not set; "
            "use `rlhf train CONFIG` or `torchrun --nproc-per-node N -m rlhf.train CONFIG`"
        )
    world = World(*(int(environ[n].split("(")[0]) for n in names))
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size):
        raise RuntimeError(
            f"rank {world.rank} of {world.size}, local rank {world.local_rank} of "
            f"{world.local_size}: a rank must be below its size"
        )
    return world
