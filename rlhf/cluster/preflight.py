"""``rlhf preflight``: look at every node before anything is loaded, and name the unfit ones."""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlhf.cluster.facts import NodeFacts, read_facts
from rlhf.cluster.judge import Fault, Meeting, Need, judge
from rlhf.cluster.meet import Place, confer
from rlhf.config.check import rollout_layout, train_layout
from rlhf.config.schema import Config
from rlhf.dist.node import num_nodes
from rlhf.dist.slurm import read_hosts, read_task
from rlhf.dist.world import read_ports
from rlhf.planner.fit import misfits
from rlhf.planner.job import job_of
from rlhf.planner.memory import Job, Ledger, Machine, ledger
from rlhf.planner.train_memory import disk_bytes
from rlhf.weights.model_shape import load_model_shape

EXIT_REFUSED = 2
EXIT_UNFIT = 3
OTHER_BYTES = int(8e9)
"""Of a GPU, as `rlhf plan` has it: context, communicators, graphs."""


def run(args: Namespace) -> int:
    """Run on this node, by srun on every node; returns the exit status.

    0: all nodes are fit. 2: the request is wrong, whatever the nodes. 3: a node is unfit; the first
    node prints a line for each fault.

    Raises:
        ValueError: the configuration cannot be read.
        LauncherError: what Slurm says contradicts itself.
    """
    from rlhf.config.load import load_config
    from rlhf.launch import default_ranks

    config = load_config(args.config, args.overrides)
    count = num_nodes()
    ranks = config.dist.ranks or default_ranks() * count
    if ranks % count:
        raise ValueError(f"dist.ranks={ranks} is no multiple of the {count} nodes")
    task = read_task(os.environ) if count > 1 else None
    hosts = read_hosts(os.environ) if task else [platform.node()]
    index = task.node if task else 0
    fault = _refusal(config, ranks, args.config)
    plans = [read_ports(os.environ, n, count, ranks // count) for n in range(count)]
    mine = plans[index]
    facts = read_facts(
        hosts[index], fault, config.model.path, config.run_dir, mine.all_ports() if mine else []
    )
    decide = partial(_decide, config=config, ranks=ranks, count=count, refused=bool(fault))
    if count == 1:
        return _end(decide([facts], Meeting({}, {})), args.unfit, speaks=True)
    probes = tuple(plan.probe for plan in plans if plan is not None)
    assert plans[0] is not None  # several nodes: there is a job
    try:
        faults = confer(Place(index, tuple(hosts), plans[0].preflight, probes), facts, decide)
    except ConnectionError as error:  # nobody else can say it
        return _end([Fault(hosts[index], f"cannot reach {error}")], None, speaks=True)
    return _end(faults, args.unfit, speaks=index == 0)


def _refusal(config: Config, ranks: int, source: str) -> str:
    """What the checks before a start refuse on this node; empty: nothing."""
    from rlhf.preflight import check

    try:
        check(config, ranks, source)
    except ValueError as error:
        return str(error)
    return ""


def _decide(
    nodes: Sequence[NodeFacts],
    meeting: Meeting,
    *,
    config: Config,
    ranks: int,
    count: int,
    refused: bool,
) -> list[Fault]:
    """On the first node: nodes against one another, against the job, and the job's own plan."""
    if refused or not nodes:  # the model cannot be read here: there is nothing to plan with
        return judge(nodes, meeting, Need(ranks // count))
    job, found, machine = _plan(config, ranks, count, nodes)
    need = Need(
        ranks_per_node=ranks // count,
        host_bytes=_host_bytes(found, ranks // count, gpu=nodes[0].has_driver),
        disk_bytes=disk_bytes(job.shape, job.itemsize).state,
    )
    faults = judge(nodes, meeting, need)
    if nodes[0].has_driver:
        faults += [Fault("", f"plan: {misfit}") for misfit in misfits(job, found, machine)]
    return faults


def _plan(
    config: Config, ranks: int, count: int, nodes: Sequence[NodeFacts]
) -> tuple[Job, Ledger, Machine]:
    """Of this very allocation: the smallest GPU counts. Without GPUs each rank has its share of the
    host's memory.
    """
    shape = load_model_shape(config.model.path)
    job = job_of(
        config,
        shape,
        train_layout(config.train, ranks),
        rollout_layout(config.rollout, ranks),
        config.reshard.window_mib << 20,
    )
    host = min(node.available_bytes for node in nodes)
    gpus = [gpu.memory_bytes for node in nodes for gpu in node.gpus]
    machine = Machine(
        gpu_bytes=min(gpus) if gpus else host // (ranks // count),
        host_bytes=host,
        gpus_per_node=ranks // count,
        other_bytes=OTHER_BYTES if gpus else 0,
    )
    return job, ledger(job, machine), machine


def _host_bytes(found: Ledger, ranks_per_node: int, *, gpu: bool) -> int:
    """Largest over nodes; without GPUs also what ranks would have on theirs."""
    host = max(found.host)
    if gpu:
        return host
    return host + ranks_per_node * max(max(found.phase_bytes(span)) for span in found.phases)


def _end(faults: Sequence[Fault], unfit: Path | None, *, speaks: bool) -> int:
    """Print, and name the unfit nodes in a file for who starts the job again."""
    hosts = list(dict.fromkeys(fault.host for fault in faults if fault.host))
    if speaks:
        for fault in faults:
            print(fault, file=sys.stderr)
        if unfit is not None and hosts:
            unfit.parent.mkdir(parents=True, exist_ok=True)
            unfit.write_text("".join(f"{host}\n" for host in hosts), encoding="utf-8")
        if not faults:
            print("preflight: all nodes are fit")
    if any(not fault.host for fault in faults):
        return EXIT_REFUSED
    return EXIT_UNFIT if faults else 0
