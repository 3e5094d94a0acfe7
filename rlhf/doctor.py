"""``rlhf doctor``: what this machine has, what is missing, and what each missing piece costs."""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

APEX_BUILD = (
    "NVIDIA apex is built from its source (github.com/NVIDIA/apex): pip install -v "
    "--no-build-isolation --config-settings --build-option=--cpp_ext "
    "--config-settings --build-option=--cuda_ext ./"
)


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def can_train(self) -> bool:
        return all(f.level is not Level.PROBLEM for f in self.findings)

    def as_json(self) -> str:
        return json.dumps([asdict(f) for f in self.findings], indent=1)

    def as_text(self) -> str:
        width = max(len(f.topic) for f in self.findings)
        return "\n".join(
            f"{f.level.upper() if f.level is Level.PROBLEM else f.level:8}"
            f"{f.topic:{width}}  {f.text}"
            for f in self.findings
        )


def diagnose(environ: Mapping[str, str] = os.environ) -> Report:
    """Look at versions, devices, links, stand-ins and allocator settings. Starts nothing."""
    import torch

    gpu = torch.cuda.is_available()
    findings = [
        Finding("python", Level.OK, f"{platform.python_version()} on {platform.machine()}"),
        *_required(),
        *_devices(gpu),
        transformer_engine(_version("transformer-engine"), gpu),
        apex(_apex_kind(), gpu),
        _memory_saver(gpu),
        *allocators(environ, gpu),
        _shared_memory(),
    ]
    return Report(tuple(findings))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


REQUIRED = {
    "torch": "everything",
    "megatron-core": "training",
    "sglang": "rollout",
    "transformers": "SGLang reads model configurations with it",
    "psutil": "without it a checkpoint save hangs for ever",
    "einops": "attention with positions",
}


def _required() -> list[Finding]:
    out = []
    for name, purpose in REQUIRED.items():
        version = _version(name)
        if version is None:
            out.append(Finding(name, Level.PROBLEM, f"missing ({purpose}); run `make install`"))
        else:
            out.append(Finding(name, Level.OK, version))
    return out


def _devices(gpu: bool) -> list[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0))
    out = [Finding("cpu", Level.OK, f"{cores} cores")]
    if not gpu:
        text = "none: gloo and torch's own kernels stand in; for tests, demos and rehearsals"
        return [*out, Finding("gpu", Level.NOTE, text)]
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        text = f"{i}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB"
        out.append(Finding("gpu", Level.OK, text))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [*out, Finding("nccl", Level.OK, nccl), _links()]


def _links() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("links", Level.NOTE, "nvidia-smi not found: links between GPUs unknown")
    done = subprocess.run(
        [tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
    )
    kinds = sorted({w for w in done.stdout.split() if w.startswith(("NV", "PIX", "PHB", "SYS"))})
    return Finding("links", Level.OK, " ".join(kinds) or "one GPU")


def transformer_engine(version: str | None, gpu: bool) -> Finding:
    """Its presence, and what training without it costs."""
    if version is not None:
        return Finding("transformer-engine", Level.OK, version)
    text = "missing: torch's attention and unfused norms instead, same parameter names"
    if gpu:
        text += "; slower training and no fp8; install transformer-engine[pytorch]"
    return Finding("transformer-engine", Level.NOTE, text)


def _apex_kind() -> str:
    """``none``, ``nvidia``, or ``other`` for the package of that name on the package index."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "none"
    folders = [Path(p) for p in spec.submodule_search_locations or ()]
    return "nvidia" if any((p / "normalization").is_dir() for p in folders) else "other"


def apex(kind: str, gpu: bool) -> Finding:
    """NVIDIA apex is optional; the project of the same name on the package index is a mistake."""
    if kind == "nvidia":
        return Finding("apex", Level.OK, "NVIDIA apex: fused Adam and gradient accumulation")
    if kind == "other":
        return Finding(
            "apex",
            Level.PROBLEM,
            "the installed `apex` is not NVIDIA's but another project of that name; "
            f"pip uninstall apex. {APEX_BUILD}",
        )
    text = "missing: gradients are accumulated unfused"
    return Finding("apex", Level.NOTE, f"{text}. {APEX_BUILD}" if gpu else text)


def _memory_saver(gpu: bool) -> Finding:
    version = _version("torch-memory-saver")
    if version is not None:
        return Finding("torch-memory-saver", Level.OK, version)
    if not gpu:
        return Finding("torch-memory-saver", Level.NOTE, "not needed without a GPU")
    text = "missing: a sleeping engine cannot give its memory to training; install it"
    return Finding("torch-memory-saver", Level.PROBLEM, text)


def allocators(environ: Mapping[str, str], gpu: bool) -> list[Finding]:
    """Settings that would break the sharing of one GPU between trainer and engine."""
    if not gpu:
        return []
    setting = environ.get("PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF", ""))
    if "expandable_segments:True" in setting:
        return [Finding("allocator", Level.OK, f"trainer: {setting}; not passed on to engines")]
    text = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: phases release memory better"
    return [Finding("allocator", Level.NOTE, text)]


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", Level.PROBLEM, f"not usable: {error}")
    level = Level.OK if free > 2**30 else Level.NOTE
    return Finding("/dev/shm", level, f"{free / 2**30:.1f} GiB free")
