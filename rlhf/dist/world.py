"""Which rank am I, of how many: read from the launcher's environment, never guessed.

Three launchers: ``rlhf train`` and torchrun, which set the same variables (one of them may be a
task of srun on each node), and srun with one task per rank, which sets Slurm's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from rlhf.dist.ports import ENGINE_PORTS, PortPlan, plan_ports
from rlhf.dist.slurm import LauncherError, device_index, is_srun_task, read_hosts, read_task


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: int | None = None
    """Number of this rank's device among those that it sees; None: that of its local rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device_index(self) -> int:
        return self.local_rank if self.device is None else self.device


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """True under torchrun, or under srun with one task per rank and MASTER_ADDR set."""
    return "RANK" in environ or ("SLURM_PROCID" in environ and "MASTER_ADDR" in environ)


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """The world that the launcher describes.

    Raises:
        LauncherError: variables are missing or contradict one another.
    """
    if "RANK" not in environ and "SLURM_PROCID" in environ:
        return _from_srun(environ)
    missing = [n for n in (*TORCHRUN, *MEETING_POINT) if n not in environ]
    if missing:
        raise LauncherError(
            f"not started by torchrun or srun: {', '.join(missing)} not set; "
            "use `rlhf train CONFIG` or `torchrun --nproc-per-node N -m rlhf.train CONFIG`"
        )
    rank, size, local_rank, local_size = (int(environ[n]) for n in TORCHRUN)
    if not (0 <= rank < size and 0 <= local_rank < local_size):
        raise LauncherError(
            f"rank {rank} of {size}, local rank {local_rank} of {local_size}: a rank must be below "
            "its size"
        )
    if local_size > size:
        raise LauncherError(
            f"LOCAL_WORLD_SIZE={local_size} ranks on this node are more than WORLD_SIZE={size}"
        )
    _check_agents(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return World(rank, size, local_rank, local_size, device_index(local_rank, visible))


def join_world(environ: MutableMapping[str, str] = os.environ) -> World:
    """The same, and torchrun's variables set for what reads them after us (torch does).

    Under srun the ranks meet on the first node, at the port that the plan of the job gives.

    Raises:
        LauncherError: as :func:`read_world`; or the job or its first node is not known.
    """
    world = read_world(environ)
    if "RANK" not in environ:
        values = (world.rank, world.size, world.local_rank, world.local_size)
        environ.update({name: str(value) for name, value in zip(TORCHRUN, values, strict=True)})
    if any(name not in environ for name in MEETING_POINT):
        host, port = meeting_point(environ, world.local_size)
        environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    return world


def meeting_point(environ: Mapping[str, str], ranks_per_node: int) -> tuple[str, int]:
    """(host, port) of the store of a Slurm step's ranks: the same on every node.

    Raises:
        LauncherError: Slurm names no nodes or no job.
    """
    hosts = read_hosts(environ)
    plan = read_ports(environ, 0, len(hosts), ranks_per_node)
    if not hosts or plan is None:
        raise LauncherError(
            "where ranks meet is not known: neither MASTER_ADDR and MASTER_PORT nor "
            "SLURM_JOB_NODELIST and SLURM_JOB_ID are set"
        )
    return hosts[0], plan.store


def read_ports(
    environ: Mapping[str, str], node: int, num_nodes: int, ranks_per_node: int
) -> PortPlan | None:
    """The ports of a node of this job; None outside Slurm, where the kernel gives them out.

    Each rank of the node has those of one engine; an engine has its leader's.

    Raises:
        ValueError: one node needs more ports than there are.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal() or num_nodes == 0:
        return None
    return plan_ports(int(job), node, num_nodes, ranks_per_node, ENGINE_PORTS)


def _from_srun(environ: Mapping[str, str]) -> World:
    task = read_task(environ)
    if task.size > 1 and "SLURM_JOB_ID" in environ and not is_srun_task(environ):
        raise LauncherError(
            f"this is the batch script of a job of {task.size} tasks, not one of them "
            "(SLURM_STEP_ID is not set): start ranks with srun"
        )
    index = device_index(task.local_rank, environ.get("CUDA_VISIBLE_DEVICES"))
    return World(task.rank, task.size, task.local_rank, task.local_size, index)


def _check_agents(environ: Mapping[str, str]) -> None:
    """An agent that starts ranks itself is started once per node."""
    agents = environ.get("GROUP_WORLD_SIZE")
    if agents is None or not is_srun_task(environ):
        return
    tasks = read_task(environ).size
    if tasks > 1 and tasks != int(agents):
        raise LauncherError(
            f"srun started {tasks} torchrun agents, each knows of {agents}: give torchrun "
            "--nnodes=$SLURM_NNODES and srun --ntasks-per-node=1"
        )
