"""A configuration file and dotted overrides into a frozen model; all faults at once."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlhf.config.faults import ConfigError, did_you_mean
from rlhf.config.schema import Config
from rlhf.config.yaml_text import dump_yaml, parse_yaml

ModelT = TypeVar("ModelT", bound=BaseModel)
LONGEST_SHOWN = 60


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``a.b=c`` overrides, check keys, types and ranges.

    Raises:
        ConfigError: one line per fault, ``file:key.path: what must hold, what it is, what to do``;
            ``override`` stands for the file where the value came from an override.
    """
    if not str(path):
        raise ConfigError(["the configuration's name must not be empty"])
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    return load_text(Config, text, str(path), overrides)


def load_text(
    schema: type[ModelT], text: str, source: str, overrides: Sequence[str] = ()
) -> ModelT:
    """A YAML text as an instance of ``schema``; ``source`` names the text in messages.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    try:
        raw, repeated = parse_yaml(text)
    except ValueError as error:
        raise ConfigError([f"{source}:{error}"]) from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ConfigError([f"{source}: must be a mapping of keys, is {_shown(raw)}"])
    faults = [f"{source}:{line}" for line in repeated]
    changed: dict[tuple[str, ...], str] = {}
    for override in overrides:
        try:
            key = apply_override(raw, override)
        except ValueError as error:
            faults.append(f"override {override!r}: {error}")
            continue
        lost = [text for old, text in changed.items() if old[: len(key)] == key]
        faults += [f"override {override!r}: undoes {text!r}; give one of them" for text in lost]
        changed[key] = override
    try:
        config = schema.model_validate(raw)
    except ValidationError as error:
        found = [_Fault(schema, raw, details) for details in error.errors(include_url=False)]
        for fault in _without_echoes(found):
            came_from_override = any(_related(fault.path, key) for key in changed)
            where = "override" if came_from_override else source
            faults.append(f"{where}:{'.'.join(fault.path)}: {fault.text()}")
        raise ConfigError(faults) from None
    if faults:
        raise ConfigError(faults)
    return config


def dump_config(config: BaseModel) -> str:
    """The resolved configuration as YAML; loads back equal."""
    return dump_yaml(config.model_dump(mode="json"))


def apply_override(raw: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set ``a.b=value`` in nested mappings (list items by number); returns the key path.

    The value is YAML, so ``true``, ``1e-6``, ``[1, 2]`` and ``{a: b}`` mean what they mean in a
    file.

    Raises:
        ValueError: no ``=``, no key, a value that is not YAML, or a path through a non-section.
    """
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ValueError("must look like key.path=value, e.g. optimizer.lr=1e-6")
    value, repeated = parse_yaml(text)
    if repeated:
        raise ValueError(repeated[0])
    here: Any = raw
    for i, part in enumerate(path[:-1]):
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
        here = _child(here, part, path[:i])
    if isinstance(here, list):
        _child(here, path[-1], path[:-1])
        here[int(path[-1])] = value
    elif isinstance(here, dict):
        here[path[-1]] = value
    else:
        _child(here, path[-1], path[:-1])
    return path


def _child(here: Any, part: str, path: Sequence[str]) -> Any:
    name = ".".join(path)
    if isinstance(here, dict):
        return here[part]
    if isinstance(here, list):
        if part.isascii() and part.isdigit() and int(part) < len(here):
            return here[int(part)]
        raise ValueError(f"{name} is a list of {len(here)}: {part!r} must be a number below that")
    raise ValueError(f"{name} is {_shown(here)}, not a section")


def _related(path: Sequence[str], key: Sequence[str]) -> bool:
    """One is inside the other, or they are equal."""
    num = min(len(path), len(key))
    return tuple(path[:num]) == tuple(key[:num])


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    text = (
        f"a section with {', '.join(map(str, value))}" if isinstance(value, dict) else repr(value)
    )
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."


@dataclass(frozen=True)
class _Fault:
    """One pydantic error in the user's words."""

    schema: type[BaseModel]
    raw: Mapping[str, Any]
    details: ErrorDetails

    @property
    def path(self) -> tuple[str, ...]:
        """The key path as the user wrote it: pydantic's without union tags."""
        loc, here, out = self.details["loc"], self.raw, []
        for i, part in enumerate(loc):
            last_and_absent = i == len(loc) - 1 and self.details["type"] == "missing"
            if isinstance(here, dict) and part in here:
                here = here[part]
            elif isinstance(here, list) and isinstance(part, int):
                here = here[part] if part < len(here) else None
            elif not last_and_absent:
                continue
            out.append(str(part))
        if self.details["type"].startswith("union_tag"):
            out.append(self.details["ctx"]["discriminator"].strip("'"))
        return tuple(out)

    def text(self) -> str:
        """What must hold, what it is, what to do."""
        kind, value, ctx = self.details["type"], self.details["input"], self.details.get("ctx", {})
        name = self.path[-1] if self.path else ""
        if kind == "extra_forbidden":
            return f"unknown key; {self._where_it_belongs(name)}"
        if kind == "missing":
            return f"must be given{self._doc()}"
        if kind in ("model_type", "model_attributes_type", "dict_type"):
            return f"must be a section (key: value), is {_shown(value)}"
        if kind == "union_tag_not_found":
            return f"must be given; {did_you_mean('', _quoted(self._tags()))}"
        if kind == "union_tag_invalid":
            tag = str(ctx["tag"])
            return f"is {tag!r}; {did_you_mean(tag, _quoted(ctx['expected_tags']))}"
        if kind == "literal_error":
            options = _quoted(ctx["expected"])
            hint = did_you_mean(str(value), options)
            listed = "" if hint.startswith("possible") else f"must be one of {', '.join(options)}, "
            return f"{listed}is {_shown(value)}; {hint}"
        message = re.sub(r"^Value error, ", "", self.details["msg"])
        message = re.sub(r"^(Input|String|Tuple|List|Value) should ", "must ", message)
        return f"{message}, is {_shown(value)}{self._doc()}"

    def _tags(self) -> str:
        field = _field_type(self.schema, self.details["loc"])
        return " ".join(f"'{tag}'" for tag in _variants(field))

    def _doc(self) -> str:
        model = _section(self.schema, self.details["loc"][:-1])
        name = str(self.details["loc"][-1]) if self.details["loc"] else ""
        field = model.model_fields.get(name) if model else None
        if field is None or not field.description:
            return ""
        return f" ({' '.join(field.description.split())})"

    def _where_it_belongs(self, name: str) -> str:
        """A near name in this section, else where the name exists, else what is possible."""
        model = _section(self.schema, self.details["loc"][:-1])
        here = list(model.model_fields) if model else []
        near = did_you_mean(name, here)
        if near.startswith("did"):
            return near
        elsewhere = [path for path in _all_keys(self.schema) if path.split(".")[-1] == name]
        return f"did you mean {' or '.join(elsewhere)}?" if elsewhere else near


def _without_echoes(faults: Sequence[_Fault]) -> list[_Fault]:
    """Faulty items are left out before a list's length is checked: that second fault is an echo."""
    return [
        fault
        for fault in faults
        if fault.details["type"] != "too_short"
        or not any(f is not fault and _related(f.path, fault.path) for f in faults)
    ]


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _unwrap(kind: Any) -> Iterator[Any]:
    """The types that an annotation allows, without Annotated, None and unions."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _unwrap(get_args(kind)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(kind):
            yield from _unwrap(part)
    elif kind is not type(None):
        yield kind


def _variants(kind: Any) -> dict[str, type[BaseModel]]:
    """Tag -> model of a union whose members have a literal ``type``."""
    out = {}
    for part in _unwrap(kind):
        if get_origin(part) is tuple:
            out.update(_variants(get_args(part)[0]))
        elif isinstance(part, type) and issubclass(part, BaseModel):
            field = part.model_fields.get("type")
            out.update(dict.fromkeys(get_args(field.annotation), part) if field else {})
    return out


def _field_type(schema: Any, loc: Sequence[int | str]) -> Any:
    """The annotation at pydantic's error path (union tags included)."""
    here = schema
    for part in loc:
        found = None
        for kind in _unwrap(here):
            if isinstance(part, int) and get_origin(kind) in (tuple, list):
                found = get_args(kind)[0]
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                field = kind.model_fields.get(str(part))
                found = field.annotation if field else found
        here = found or _variants(here).get(str(part))
    return here


def _section(schema: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    for kind in _unwrap(_field_type(schema, loc)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _all_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        for kind in _unwrap(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _all_keys(kind, f"{prefix}{name}.")
