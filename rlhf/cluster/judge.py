"""Which nodes are unfit, and why: a pure function of what they have told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf.cluster.facts import NodeFacts

GIGA = 1e9
SHM_PER_RANK_BYTES = 64 * 2**20
"""NCCL and SGLang put their channels there."""
CLOCK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Need:
    """What the job asks of each node."""

    ranks_per_node: int
    host_bytes: int = 0
    """Largest over nodes."""
    disk_bytes: int = 0
    """Of one checkpoint."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line; ``host`` is empty when the request is wrong, whatever the node."""

    host: str
    cause: str

    def __str__(self) -> str:
        return f"preflight: {self.host}: {self.cause}" if self.host else self.cause


@dataclass(frozen=True, slots=True)
class Meeting:
    """What nodes have seen of one another. By host."""

    clocks: Mapping[str, float]
    """Seconds since the epoch, all read at the same moment."""
    unreachable: Mapping[str, Sequence[str]]
    absent: Sequence[str] = ()


def judge(nodes: Sequence[NodeFacts], meeting: Meeting, need: Need) -> list[Fault]:
    """All faults, in the order of nodes; empty: go on.

    A configuration that every node refuses with the same words is the request's fault.
    """
    refusals = {node.config_fault for node in nodes}
    if len(refusals) == 1 and (text := refusals.pop()) and len(nodes) > 0:
        return [Fault("", text)]
    faults = [
        Fault(host, "has not told its facts: it does not start, or does not reach the first node")
        for host in meeting.absent
    ]
    usual = {name: _most_common(node.versions.get(name, "none") for node in nodes) for name in
             sorted({name for node in nodes for name in node.versions})}  # fmt: skip
    model = _most_common(node.model for node in nodes if not node.config_fault)
    clock = sorted(meeting.clocks.values())[len(meeting.clocks) // 2] if meeting.clocks else 0.0
    for node in nodes:
        causes = [
            *_own(node, need),
            *_versions(node, usual),
            *_seen(node, meeting, clock),
        ]
        if node.model != model and not node.config_fault:
            causes.append("model folder: files differ from those that other nodes see")
        faults += [Fault(node.host, cause) for cause in causes]
    return faults


def _own(node: NodeFacts, need: Need) -> Iterator[str]:
    if node.config_fault:
        yield " | ".join(node.config_fault.splitlines())
    if node.gpu_fault:
        yield f"GPUs: {node.gpu_fault}"
    elif node.has_driver and len(node.gpus) < need.ranks_per_node:
        yield f"GPUs: {len(node.gpus)} seen, {need.ranks_per_node} ranks need one each"
    for number, gpu in enumerate(node.gpus):
        if gpu.uncorrected:
            yield f"GPU {number} ({gpu.name}): {gpu.uncorrected} uncorrected memory errors"
    if node.available_bytes < need.host_bytes:
        yield (
            f"host memory: {node.available_bytes / GIGA:.1f} GB available, this layout needs "
            f"{need.host_bytes / GIGA:.1f} GB on a node"
        )
    shm = SHM_PER_RANK_BYTES * need.ranks_per_node
    if node.shm_free_bytes < shm:
        yield f"/dev/shm: {node.shm_free_bytes / GIGA:.2f} GB free, must be {shm / GIGA:.2f} GB"
    if node.run_dir_fault:
        yield f"run_dir cannot be written: {node.run_dir_fault}"
    elif node.run_dir_free_bytes < need.disk_bytes:
        yield (
            f"run_dir: {node.run_dir_free_bytes / GIGA:.3f} GB free, a checkpoint needs "
            f"{need.disk_bytes / GIGA:.3f} GB"
        )
    if node.ports_taken:
        ports = ", ".join(map(str, node.ports_taken[:8]))
        yield f"ports {ports}, which this job will use, are taken by another process"


def _versions(node: NodeFacts, usual: Mapping[str, str]) -> Iterator[str]:
    for name, expected in usual.items():
        found = node.versions.get(name, "none")
        if found != expected:
            yield f"{name} {found}, other nodes have {expected}"


def _seen(node: NodeFacts, meeting: Meeting, clock: float) -> Iterator[str]:
    if node.host in meeting.clocks:
        off_s = meeting.clocks[node.host] - clock
        if abs(off_s) > CLOCK_LIMIT_S:
            word = "ahead of" if off_s > 0 else "behind"
            yield f"clock: {abs(off_s):.0f} s {word} the others (limit {CLOCK_LIMIT_S:.0f} s)"
    if others := meeting.unreachable.get(node.host):
        yield f"cannot reach {', '.join(others[:8])}"


def _most_common(values: Iterator[str]) -> str:
    """The first of those that occur most; empty when there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), "")
