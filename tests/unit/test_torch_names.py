"""What the package calls by name in torch exists in the torch that is installed.

Lines that only a GPU reaches are not run here; their names are looked up all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[2] / "rlhf"
ALIASES = {"torch": (), "dist": ("distributed",)}
"""First word of a dotted name -> where it begins in torch."""


def _torch_names(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """Dotted names below torch, longest first; those of calls' results have no name."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in ("torch", "torch.distributed")
    }
    for node in ast.walk(tree):
        path: list[str] = []
        at: ast.AST = node
        while isinstance(at, ast.Attribute):
            path.insert(0, at.attr)
            at = at.value
        if path and isinstance(at, ast.Name) and at.id in ALIASES.keys() & imported:
            yield (*ALIASES[at.id], *path)


def _missing(text: str) -> list[str]:
    missing = []
    for path in _torch_names(ast.parse(text)):
        found: object = torch
        for name in path:
            if not hasattr(found, name):
                missing.append(".".join(path))
                break
            found = getattr(found, name)
    return missing


def test_every_name_in_torch_exists():
    files = sorted(PACKAGE.rglob("*.py"))
    missing = {str(f.relative_to(PACKAGE)): _missing(f.read_text(encoding="utf-8")) for f in files}
    assert len(files) > 100
    assert not {file: names for file, names in missing.items() if names}


def test_a_wrong_name_is_found():
    assert _missing("import torch\ntorch.cuda.mem_get_inf(0)") == ["cuda.mem_get_inf"]
    text = "import torch.distributed as dist\ndist.TCPStore(); dist.nothing"
    assert _missing(text) == ["distributed.nothing"]
    assert not _missing("dist.nothing")
