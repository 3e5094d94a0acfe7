"""What one node has and sees, read without torch: in a second or two, on every node of a job."""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import rlhf
from rlhf.dist.device import has_gpu

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "transformer-engine")
QUERY = "name,memory.total,driver_version,ecc.errors.uncorrected.volatile.total"
SMI_LIMIT_S = 30
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    uncorrected: int
    """Memory errors since the driver was loaded that ECC could not correct."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Of one node. Texts called ``*_fault`` are empty when all is well."""

    host: str
    has_driver: bool = False
    gpus: tuple[Gpu, ...] = ()
    gpu_fault: str = ""
    available_bytes: int = 0
    """Host memory that programs may take."""
    shm_free_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    config_fault: str = ""
    """What :func:`rlhf.preflight.check` refuses here."""
    model: str = ""
    """Digest of the names and sizes of the model's files."""
    run_dir_fault: str = ""
    run_dir_free_bytes: int = 0
    ports_taken: tuple[int, ...] = ()


def read_gpus() -> tuple[tuple[Gpu, ...], str, str]:
    """(GPUs, driver, what is wrong) as ``nvidia-smi`` has it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), "", "nvidia-smi is not found"
    command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return (), "", f"nvidia-smi did not answer within {SMI_LIMIT_S} s: a GPU hangs"
    if done.returncode != 0:
        return (), "", f"nvidia-smi ended with {done.returncode}: {done.stdout.strip()[-200:]}"
    gpus, driver = parse_gpus(done.stdout)
    return gpus, driver, ""


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """(GPUs, driver) out of the lines of ``nvidia-smi --query-gpu``; MiB, [N/A] without ECC."""
    gpus, driver = [], ""
    for line in text.strip().splitlines():
        name, mib, driver, errors = (part.strip() for part in line.split(","))
        gpus.append(Gpu(name, int(mib) * 2**20, int(errors) if errors.isdecimal() else 0))
    return tuple(gpus), driver


def available_bytes() -> int:
    """Host memory that programs may take, as the kernel estimates it."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def versions() -> dict[str, str]:
    """Of Python, of packages that are installed, and of this project's own files."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    folder = Path(rlhf.__file__).parent
    found["rlhf"] = digest((p.relative_to(folder), p.read_bytes()) for p in folder.rglob("*.py"))
    return found


def model_digest(folder: str) -> str:
    """Of the names and sizes of the files, not of what is in them; empty without a folder."""
    with suppress(OSError):
        files = [p for p in Path(folder).iterdir() if p.is_file()]
        return digest((p.name, str(p.stat().st_size).encode()) for p in files)
    return ""


def digest(items: Iterable[tuple[object, bytes]]) -> str:
    """Twelve digits that differ when a name or its bytes do."""
    total = hashlib.sha256()
    for name, data in sorted((str(name), data) for name, data in items):
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()[:12]


def try_run_dir(folder: str) -> tuple[str, int]:
    """(what is wrong, free bytes): a file is written there and removed."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".preflight-{platform.node()}-{os.getpid()}"
        probe.write_bytes(bytes(1 << 20))
        probe.unlink()
        return "", shutil.disk_usage(path).free
    except OSError as error:
        return str(error), 0


def taken(ports: Iterable[int]) -> tuple[int, ...]:
    """Those on which something listens here already."""
    return tuple(port for port in ports if not _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
    return True


def read_facts(
    host: str, config_fault: str, model: str, run_dir: str, ports: Iterable[int]
) -> NodeFacts:
    """All of this node.

    Args:
        host: the name that Slurm has for it.
        config_fault: what the configuration's own checks refuse here.
        model, run_dir: folders.
        ports: that the job will listen on.
    """
    gpu = has_gpu()
    gpus, driver, gpu_fault = read_gpus() if gpu else ((), "", "")
    run_dir_fault, free = try_run_dir(run_dir)
    return NodeFacts(
        host=host,
        has_driver=gpu,
        gpus=gpus,
        gpu_fault=gpu_fault,
        available_bytes=available_bytes(),
        shm_free_bytes=shutil.disk_usage(SHARED_MEMORY).free,
        versions=versions() | ({"driver": driver} if driver else {}),
        config_fault=config_fault,
        model=model_digest(model),
        run_dir_fault=run_dir_fault,
        run_dir_free_bytes=free,
        ports_taken=taken(ports),
    )
