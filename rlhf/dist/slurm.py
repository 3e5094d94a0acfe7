"""What Slurm says about an allocation, read from its variables: pure functions.

Slurm writes lists in a short form (``node[001-003,7]``, ``4(x2),3``), and leaves out variables
whose option was not given. What is there must agree, or is refused with both numbers.
Source: "Environment variables" in the manuals of sbatch and srun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

MAX_HOSTS = 100_000
"""More than this from one expression is a slip of the pen, not a cluster."""
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NO_DEVICES = ("", "-1", "NoDevFiles")


class LauncherError(RuntimeError):
    """What a launcher says of its processes is missing or contradicts itself."""


def expand_nodelist(text: str) -> list[str]:
    """Host names in the order of ``scontrol show hostnames``: ``r[1-2]n[08-10],login`` has seven.

    The width of a range's first number is kept: ``[098-101]`` is 098, 099, 100, 101.

    Raises:
        ValueError: the text is no list of hosts; says where.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        names = [""]
        for literal, group in _parts(item, text):
            choices = _expand_group(group, text) if group is not None else [literal]
            if len(names) * len(choices) > MAX_HOSTS:
                raise ValueError(f"node list {text!r}: {item!r} names over {MAX_HOSTS} hosts")
            names = [name + choice for name in names for choice in choices]
        hosts += names
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Tasks of each node, in the order of the node list: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: the text is no such list.
    """
    tasks: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None or match[1] == "0" or match[2] == "0":
            raise ValueError(
                f"tasks per node {text!r}: {item!r} is not of the form 4 or 4(x2), both above 0"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a step: a rank, or an agent that starts the ranks of its node."""

    rank: int
    local_rank: int
    node: int
    tasks_per_node: tuple[int, ...]
    """By node; their sum is the size of the step."""

    @property
    def size(self) -> int:
        return sum(self.tasks_per_node)

    @property
    def local_size(self) -> int:
        return self.tasks_per_node[self.node]


def is_srun_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. The batch script itself has no step."""
    return "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ


def read_task(environ: Mapping[str, str]) -> Task:
    """This process among those that srun has started.

    Ranks must lie on nodes in blocks (``srun --distribution=block``, Slurm's default for tasks):
    the ranks of an engine are neighbours and share a node.

    Raises:
        LauncherError: a variable is missing, or two contradict one another; with both numbers.
    """
    rank = _number(environ, "SLURM_PROCID")
    tasks = _tasks_per_node(environ)
    total = sum(tasks)
    if rank >= total:
        raise LauncherError(f"Slurm: SLURM_PROCID={rank} must be below the step's {total} tasks")
    starts = list(accumulate(tasks, initial=0))
    node = next(i for i in range(len(tasks)) if rank < starts[i + 1])
    if (said := _optional(environ, "SLURM_NODEID")) is not None and said != node:
        raise LauncherError(
            f"Slurm: task {rank} runs on node {said} (SLURM_NODEID), but in blocks of "
            f"{_short(tasks)} tasks it belongs on node {node}: start with srun --distribution=block"
        )
    local = rank - starts[node]
    if (said := _optional(environ, "SLURM_LOCALID")) is not None and said != local:
        raise LauncherError(
            f"Slurm: task {rank} is number {said} on its node (SLURM_LOCALID), but in blocks of "
            f"{_short(tasks)} tasks it is number {local}: start with srun --distribution=block"
        )
    return Task(rank, local, node, tuple(tasks))


def read_hosts(environ: Mapping[str, str]) -> list[str]:
    """Nodes of the step, or of the job; empty when Slurm does not say.

    Raises:
        LauncherError: their number is not that of the nodes.
    """
    text = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if text is None:
        return []
    hosts = expand_nodelist(text[1])
    count = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if count is not None and int(count[1]) != len(hosts):
        raise LauncherError(
            f"Slurm: {text[0]}={text[1]} names {len(hosts)} nodes, {count[0]} says {count[1]}"
        )
    return hosts


def device_index(local_rank: int, visible: str | None) -> int:
    """Which of the devices that this process sees is its own.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None or no device in it: nothing is hidden.

    Raises:
        LauncherError: it sees several devices, and fewer than its number on the node needs.
    """
    devices = [d for d in (visible or "").split(",") if d.strip() not in _NO_DEVICES]
    if not devices:
        return local_rank
    if len(devices) == 1:  # bound to its own by srun --gpus-per-task
        return 0
    if local_rank >= len(devices):
        raise LauncherError(
            f"local rank {local_rank} needs device {local_rank}, CUDA_VISIBLE_DEVICES={visible} "
            f"has {len(devices)}: ask for as many GPUs per node as there are ranks on it"
        )
    return local_rank


# ------------------------------------------------------------------------------------ reading


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    listed = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    total = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    each = _optional(environ, "SLURM_NTASKS_PER_NODE")
    if listed is not None:
        tasks = expand_tasks(listed[1])
    elif each is not None and nodes is not None:
        tasks = [each] * int(nodes[1])
    elif total is not None and (nodes is None or nodes[1] == "1"):
        tasks = [int(total[1])]
    else:
        raise LauncherError(
            "Slurm: which tasks run where is not known: neither SLURM_TASKS_PER_NODE nor "
            "SLURM_NTASKS_PER_NODE with SLURM_NNODES is set; start with srun"
        )
    if total is not None and int(total[1]) != sum(tasks):
        where = f"{listed[0]}={listed[1]}" if listed else f"SLURM_NTASKS_PER_NODE={each}"
        raise LauncherError(f"Slurm: {where} makes {sum(tasks)} tasks, {total[0]} says {total[1]}")
    if nodes is not None and int(nodes[1]) != len(tasks):
        where = f"{listed[0]}={listed[1]}" if listed else f"{sum(tasks)} tasks on one node"
        raise LauncherError(f"Slurm: {where} is of {len(tasks)} nodes, {nodes[0]} says {nodes[1]}")
    return tasks


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    """The first of these that is set, with its value."""
    return next(((name, environ[name]) for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _optional(environ, name)
    if value is None:
        raise LauncherError(f"Slurm: {name} is not set: start with srun")
    return value


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise LauncherError(f"Slurm: {name}={text!r} is not a number")
    return int(text)


def _short(tasks: list[int]) -> str:
    return str(tasks[0]) if len(set(tasks)) == 1 else ",".join(map(str, tasks[:8]))


# ------------------------------------------------------------------------------------ node lists


def _split_outside_brackets(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {text!r}: brackets do not match at position {i}")
        if char == "," and depth == 0:
            items.append(text[start:i])
            start = i + 1
    items.append(text[start:])
    if depth:
        raise ValueError(f"node list {text!r}: a bracket is not closed")
    if not all(item.strip() for item in items):
        raise ValueError(f"node list {text!r}: an item is empty")
    return [item.strip() for item in items]


def _parts(item: str, text: str) -> Iterator[tuple[str, str | None]]:
    """Literal texts, and what stands in brackets."""
    for literal, group in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        if literal and re.search(r"\s", literal):
            raise ValueError(f"node list {text!r}: {literal!r} has a space in it")
        yield literal, None if literal else group


def _expand_group(group: str, text: str) -> list[str]:
    out: list[str] = []
    for piece in group.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"node list {text!r}: {piece!r} in brackets is no number or range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f"node list {text!r}: {piece!r} must run upwards to a near number")
        out += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return out
