"""Imports point down, no cycles, one door per outside library, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rlhf"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

FLOORS = [
    {
        "types",
        "dist.layout",
        "weights.piece",
        "weights.config_keys",
        "weights.model_shape",
        "config.schema",
    },
    {"config", "dist", "track", "platform", "weights", "packing"},
    {
        "config.check",
        "algorithms",
        "rewards",
        "envs",
        "data",
        "batching",
        "memory.chunks",
        "memory.host",
        "memory.table",
        "memory.ways",
        "saved",
        "reshard.balance",
        "reshard.bounds",
        "reshard.bundles",
        "reshard.plan",
        "reshard.rounds",
        "reshard.schedule",
        "reshard.topology",
        "reshard.wire",
    },
    {"planner", "memory", "mcore", "reshard", "preflight", "weights.export"},
    {"roles", "rollout"},
    {"loop", "evaluate", "run", "ending", "ground", "checkpoint", "recorder", "flow"},
    {
        "builder",
        "parts",
        "role_parts",
        "memory_parts",
        "launch",
        "train",
        "cli",
        "bench",
        "cluster",
        "convert",
        "doctor",
        "doctor_probe",
        "explain",
        "plan",
        "promise",
        "compare",
        "tune",
        "rehearsal",
        "rehearse",
        "solved",
        "start",
        "state",
    },
]
"""Lowest first; the longest matching name decides."""

DOORS = {
    "megatron": ("mcore", "platform"),
    "sglang": ("rollout", "platform"),
    "transformer_engine": ("mcore", "platform"),
    "torch_memory_saver": ("memory", "rollout"),
    "safetensors": ("weights.hf_checkpoint",),
    "swanlab": ("track.sinks",),
    "wandb": ("track.sinks",),
    "tensorboardX": ("track.sinks",),
    "reasoning_gym": ("data", "rewards"),
}


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def _floor(room: str) -> int | None:
    best, floor = "", None
    for number, rooms in enumerate(FLOORS):
        for name in rooms:
            if (room == name or room.startswith(name + ".")) and len(name) > len(best):
                best, floor = name, number
    return floor


def _imports(path: Path, *, top_level: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _inside(path: Path) -> set[str]:
    """Rooms of the package that a file imports, anywhere in it."""
    rooms = {_room(p) for p in FILES}
    names = (n.removeprefix("rlhf.") for n in _imports(path, top_level=False) if "rlhf." in n)
    return {n for n in names if n in rooms and n}


@pytest.mark.parametrize("path", FILES, ids=_room)
def test_every_file_has_a_floor_and_imports_point_down(path):
    room = _room(path)
    if not room:
        return
    mine = _floor(room)
    assert mine is not None, f"{room} stands on no floor"
    for other in _inside(path):
        floor = _floor(other)
        same_folder = other.split(".")[0] == room.split(".")[0]
        assert floor is not None
        assert floor < mine or (floor == mine and (same_folder or mine >= 5)), (
            f"{room} (floor {mine}) imports {other} (floor {floor})"
        )


def test_no_import_cycles():
    graph = {_room(p): _inside(p) - {_room(p)} for p in FILES}
    done: set[str] = set()

    def visit(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, " -> ".join([*path[path.index(room) :], room])
        if room in done:
            return
        for other in sorted(graph[room]):
            visit(other, (*path, room))
        done.add(room)

    for room in graph:
        visit(room, ())


@pytest.mark.parametrize("path", FILES, ids=_room)
def test_one_door_per_outside_library(path):
    room = _room(path)
    for name in _imports(path, top_level=False):
        doors = DOORS.get(name.split(".")[0])
        if doors is not None:
            assert any(room == d or room.startswith(d + ".") for d in doors), f"{room}: {name}"


@pytest.mark.parametrize("path", FILES, ids=_room)
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"


HEAVY = ("torch", "megatron", "sglang", "transformers", "matplotlib", "swanlab", "reasoning_gym")


def test_what_runs_before_the_zygote_is_started_imports_nothing_heavy():
    """Its imports take the longest of a start; a rank's own must not delay them."""
    program = (
        "import sys, rlhf.cli, rlhf.train, rlhf.builder, rlhf.loop, rlhf.rollout.host_client;"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
