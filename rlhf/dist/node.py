"""Which node am I, of how many: for a launcher that starts the ranks of its node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.dist.slurm import LauncherError, is_srun_task, read_task
from rlhf.dist.world import meeting_point

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the run, and where the first one holds the store."""

    index: int = 0
    count: int = 1
    host: str = LOCALHOST
    port: int = 0
    """0: one that the kernel gives (one node only)."""


ONE_NODE = Node()


def num_nodes(environ: Mapping[str, str] = os.environ) -> int:
    """Nodes on each of which srun has started a launcher; 1 without srun.

    Raises:
        LauncherError: srun has started several tasks on a node.
    """
    if not is_srun_task(environ):
        return 1
    tasks = read_task(environ).tasks_per_node
    if max(tasks) > 1:
        raise LauncherError(
            f"srun started {max(tasks)} tasks on a node; `rlhf train` starts the ranks of a node "
            "itself: use srun --ntasks-per-node=1, or `python -m rlhf.train` with a task per rank"
        )
    return len(tasks)


def this_node(num_ranks: int, environ: Mapping[str, str] = os.environ) -> Node:
    """This launcher's node.

    Raises:
        LauncherError: srun has started several tasks on a node, or Slurm does not name the nodes.
        ValueError: the ranks are no multiple of the nodes.
    """
    count = num_nodes(environ)
    if count == 1:
        return ONE_NODE
    if num_ranks % count:
        raise ValueError(
            f"dist.ranks={num_ranks} is no multiple of the {count} nodes; every node has the same "
            "number of ranks"
        )
    host, port = meeting_point(environ, num_ranks // count)
    return Node(read_task(environ).node, count, host, port)
