"""Unfit nodes are named with the reason before anything is loaded, and left out if others last."""

import importlib.metadata as metadata
import shutil
import socket
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rlhf.dist.world import read_ports
from tests.helpers.runs import ROOT, tiny_config
from tests.slurm.cluster import Job


@contextmanager
def mounted(cluster, node, *arguments):
    """``mount ARGUMENTS``, whose last one is the target, on one node only."""
    cluster.control("in-node", node, "mount", *map(str, arguments))
    try:
        yield
    finally:
        cluster.control("in-node", node, "umount", str(arguments[-1]))


def changed_copy(file, folder, old, new):
    """A copy of a file in which one text differs."""
    text = Path(file).read_text(encoding="utf-8")
    assert old in text
    copy = folder / "changed"
    copy.write_text(text.replace(old, new, 1), encoding="utf-8")
    return copy


def metadata_file(package):
    files = metadata.files(package) or ()
    return next(Path(f.locate()).resolve() for f in files if f.name == "METADATA")


def plant(cluster, stack, folder, config, job):
    """Six faults on three of four nodes; the texts that must name them."""
    model, run, swap = folder / "model", folder / "run", folder / "swap"
    swap.mkdir()
    shutil.copytree(model, swap / "model")
    weights = swap / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    stack.enter_context(mounted(cluster, "node2", "--bind", swap / "model", model))

    run.mkdir()
    stack.enter_context(mounted(cluster, "node3", "-t", "tmpfs", "-o", "size=64k", "none", run))
    meminfo = swap / "meminfo"
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    few = [f"MemAvailable: {1000} kB" if x.startswith("MemAvailable") else x for x in lines]
    meminfo.write_text("\n".join(few) + "\n", encoding="ascii")
    stack.enter_context(mounted(cluster, "node3", "--bind", meminfo, "/proc/meminfo"))

    file, version = metadata_file("transformers"), metadata.version("transformers")
    other = changed_copy(file, swap, f"Version: {version}", "Version: 1.2.3")
    stack.enter_context(mounted(cluster, "node4", "--bind", other, file))
    hosts = changed_copy(cluster.folder / "hosts", swap / "model", "127.0.0.1 node2", "192.0.2.1 x")
    stack.enter_context(mounted(cluster, "node4", "--bind", hosts, "/etc/hosts"))

    ports = read_ports({"SLURM_JOB_ID": str(job)}, 3, 4, 1)
    taken = ports.engine(0)[5]
    stack.enter_context(socket.create_server(("127.0.0.1", taken)))
    return [
        ("node2", "model.safetensors"),
        ("node3", "run_dir cannot be written: "),
        ("node3", "host memory: 0.0 GB available"),
        ("node4", f"transformers 1.2.3, other nodes have {version}"),
        ("node4", f"ports {taken}, which this job will use, are taken"),
        ("node4", "cannot reach node2"),
    ]


def test_every_planted_fault_is_one_line_with_node_and_cause(cluster, tmp_path):
    config = tiny_config(tmp_path, train={"pp": 1})
    log = tmp_path / "preflight.log"
    command = f"srun {sys.executable} -m rlhf.cli preflight {config} dist.ranks=4"
    out = cluster.run(
        *("sbatch", "--parsable", "--hold", "--nodes=4", "--ntasks-per-node=1"),
        *(f"--output={log}", f"--wrap={command}"),
        PYTHONPATH=str(ROOT),
    )
    job = Job(cluster, int(out), log)
    with ExitStack() as stack:
        expected = plant(cluster, stack, tmp_path, config, job.number)
        cluster.run("scontrol", "release", str(job.number))
        facts = job.wait()
    text = log.read_text(encoding="utf-8")
    assert facts["ExitCode"] == "3:0", text
    lines = [line for line in text.splitlines() if line.startswith("preflight: ")]
    assert len(lines) == len(expected), text
    for node, cause in expected:
        assert sum(x.startswith(f"preflight: {node}: ") and cause in x for x in lines) == 1, text


@pytest.mark.slow
def test_an_unfit_node_is_left_out_while_others_last(cluster, tmp_path):
    """Its model folder is missing; the job trains on two of the others."""
    config = tiny_config(tmp_path, num_steps=1)
    model = tmp_path / "model"
    with mounted(cluster, "node1", "-t", "tmpfs", "none", model):
        job = cluster.submit(config, 2, PREFLIGHT="1")
        facts = job.ends_well()
    assert facts["Restarts"] == "1"
    assert "node1" not in cluster.hosts(facts["NodeList"])
    log = job.log.read_text(encoding="utf-8")
    assert f"preflight: node1: {config}:model.path: " in log
    assert "preflight: node1 left out" in log
    assert "preflight: all nodes are fit" in log
