"""Whole runs as a user starts them: a tiny model, a tiny task, ``rlhf train``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.spawn import free_port
from tests.helpers.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
RUN_LIMIT_S = 240


def write_copy_task(path: Path, num_rows: int, seed: int = 0) -> None:
    """Rows ``abc>`` -> ``abc``."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        text = "".join(rng.choice("abcdefgh") for _ in range(3))
        rows.append({"prompt": f"{text}>", "answer": text})
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def tiny_config(folder: Path, family: str = "llama", **sections: Any) -> Path:
    """Model, data and configuration of a run of seconds; returns the YAML file.

    ``sections`` are merged into the configuration, one level deep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not model.is_dir():
        make_tiny(model, family)
        write_copy_task(folder / "train.jsonl", 64, seed=0)
        write_copy_task(folder / "eval.jsonl", 8, seed=1)
    source = {
        "type": "jsonl",
        "name": "copy",
        "path": str(folder / "train.jsonl"),
        "reward": f"{folder / 'reward.py'}:share_of_letters",
    }
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "num_steps": 3,
        "model": {"path": str(model), "dtype": "float32"},
        "dist": {"ranks": 2, "timeout_s": 60},
        "train": {"pp": 2, "tokens_per_microbatch": 64},
        "rollout": {"sampling": {"max_new_tokens": 6, "stop": [">"]}, "kv_tokens": 2048},
        "data": {
            "train": [source],
            "eval": [{**source, "path": str(folder / "eval.jsonl")}],
            "max_prompt_tokens": 16,
        },
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "optimizer": {"lr": 1e-3},
        "reshard": {"verify_every": 1},
        "checkpoint": {"export_hf": False},
        "track": {"console": False},
    }
    (folder / "reward.py").write_text(
        "def share_of_letters(prompt, text, trajectory):\n"
        '    """Share of lower-case letters: random models already differ in it."""\n'
        "    return sum(c.islower() for c in text) / 6\n",
        encoding="utf-8",
    )
    for name, section in sections.items():
        if isinstance(section, dict) and isinstance(config.get(name), dict):
            config[name] = {**config[name], **section}
        else:
            config[name] = section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def clean_environment() -> dict[str, str]:
    """The environment of a user's shell: no launcher's variables."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    out = {k: v for k, v in os.environ.items() if k not in drop}
    return {**out, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def start(*arguments: str) -> subprocess.Popen[str]:
    """``rlhf ARGUMENTS`` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf.cli", *arguments],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit_s: float = RUN_LIMIT_S) -> tuple[int, str, str]:
    """(status, stdout, stderr); the whole session is ended if it takes longer than the limit."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not done in {limit_s} s\n{out}\n{err}") from None
    return process.returncode, out, err


def rlhf(*arguments: str, limit_s: float = RUN_LIMIT_S) -> tuple[int, str, str]:
    """Run to the end."""
    return finish(start(*arguments), limit_s)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def wait_for(condition: Any, limit_s: float, what: str) -> Any:
    """Poll a fact of the outside world until it holds; its truthy value."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} not seen within {limit_s} s")


def start_nodes(num_nodes: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """``python -m rlhf.train ARGUMENTS`` on as many nodes of one rank each: a torchrun agent each.

    All nodes are this machine.
    """
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    meeting = [f"--nnodes={num_nodes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [
        subprocess.Popen(
            [*agent, *meeting, f"--node-rank={node}", "-m", "rlhf.train", *arguments],
            cwd=ROOT,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for node in range(num_nodes)
    ]


def finish_nodes(
    processes: list[subprocess.Popen[str]], limit_s: float = RUN_LIMIT_S
) -> list[tuple[int, str, str]]:
    """(status, stdout, stderr) of every node; each gets the limit."""
    with ThreadPoolExecutor(len(processes)) as threads:  # all pipes are read at once
        return list(threads.map(lambda process: finish(process, limit_s), processes))
