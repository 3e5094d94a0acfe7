"""YAML in and out, with the scalars of YAML 1.2: ``1e-6`` is a float and ``off`` is a text.

PyYAML alone follows YAML 1.1, where ``1e-6`` is a text, ``off`` is False, ``010`` is 8 and ``1:30``
is 90, and where the last of two equal keys wins without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"|~|null|Null|NULL", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)
_Resolvers = dict[str, list[tuple[str, "re.Pattern[str]"]]]


def _resolvers(base: _Resolvers) -> _Resolvers:
    """PyYAML's table, ours before ``base``: first character -> (tag, pattern) in order of trial."""
    table: _Resolvers = {}
    for tag, pattern, first in _SCALARS:
        for char in first.replace("\0", ""):
            table.setdefault(char, []).append((tag, re.compile(f"^(?:{pattern})$")))
        if "\0" in first:
            table.setdefault("", []).append((tag, re.compile(f"^(?:{pattern})$")))
    return {key: table.get(key, []) + base.get(key, []) for key in {*table, *base}}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers({})


class _Dumper(yaml.SafeDumper):
    """Quotes each text that ``_Loader``, or a YAML 1.1 reader, would take for something else."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeDumper.yaml_implicit_resolvers)


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML text, and a ``key.path: ...`` line per repeated key.

    Raises:
        ValueError: not YAML; the message starts with ``line:column:`` where there is one.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, []
            repeated = list(_repeated(node, "", set()))  # before construction merges mappings
            return loader.construct_document(node), repeated
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.line + 1}:{mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _repeated(node: yaml.Node, path: str, above: set[int]) -> Iterator[str]:
    if id(node) in above:
        return
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _repeated(item, f"{path}.{i}" if path else str(i), above)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name = str(key.value)
        here = f"{path}.{name}" if path else name
        line = key.start_mark.line + 1
        if name in lines and not key.tag.endswith(":merge"):
            yield f"{here}: must appear once, is on lines {lines[name]} and {line}; remove one"
        lines.setdefault(name, line)
        yield from _repeated(value, here, above)


def dump_yaml(value: Any) -> str:
    """YAML text that :func:`parse_yaml` reads back as an equal value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
