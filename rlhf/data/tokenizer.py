"""Text <-> token ids from a Hugging Face folder, without transformers.

Reads ``tokenizer.json`` (with the ``tokenizers`` library), ``tokenizer_config.json`` and the chat
template in it or beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]
"""A turn of a chat: ``{"role": ..., "content": ...}``."""

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        ValueError: no ``tokenizer.json``, or one that cannot be read.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        slow = [p.name for p in sorted(folder.glob("*")) if p.name in _SLOW_FILES]
        what = f"only {', '.join(slow)}" if slow else "no tokenizer"
        raise ValueError(
            f"{folder} must hold tokenizer.json, has {what}; with transformers installed, "
            f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}") writes it'
        )
    try:
        fast = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} cannot be read: {error}") from error
    settings = _read_json(folder / "tokenizer_config.json")
    return Tokenizer(fast, settings, _chat_template(folder, settings), str(folder))


_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


class Tokenizer:
    """What a run needs of a tokenizer. ``bos_id`` is None where the model has none."""

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        chat_template: str | None,
        source: str,
    ) -> None:
        fast.no_padding()
        fast.no_truncation()
        self._fast = fast
        self._source = source
        self._chat_template = chat_template
        self._special = {name: text for name in SPECIAL if (text := _token_text(settings, name))}
        bos = self._special.get("bos_token")
        self.bos_id: int | None = None if bos is None else fast.token_to_id(bos)
        adds = settings.get("add_bos_token")
        self.adds_bos = self._processor_adds_bos() if adds is None else bool(adds)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt, with exactly one BOS where the model has one.

        A text that starts with BOS (most chat templates write it) gets no second one; a text that
        doesn't gets one if the tokenizer adds it.
        """
        ids = self._fast.encode(text, add_special_tokens=False).ids
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return list(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids; special tokens (stop tokens among them) are left out."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Message]) -> str:
        """The model's chat template over ``messages``, ready for the assistant's turn.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise ValueError(
                f"{self._source} has no chat template; give data as plain text, or a template"
            )
        try:
            template = _environment().from_string(self._chat_template)
            return template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except TemplateError as error:
            raise ValueError(f"chat template of {self._source}: {error}") from error

    def stop_token(self, text: str) -> int:
        """The id of a stop text: the engine sees token ids, so it has to be one token.

        Raises:
            ValueError: the text is several tokens.
        """
        ids = self._fast.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            pieces = [self._fast.id_to_token(i) for i in ids]
            raise ValueError(
                f"rollout.sampling.stop: {text!r} must be a single token of {self._source}, is "
                f"{len(ids)}: {pieces}; give another text"
            )
        return int(ids[0])

    def _processor_adds_bos(self) -> bool:
        ids = self._fast.encode("", add_special_tokens=True).ids
        return self.bos_id is not None and ids[:1] == [self.bos_id]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """From ``chat_template.jinja``, ``chat_template.json`` or ``tokenizer_config.json``."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _token_text(settings: Mapping[str, Any], name: str) -> str | None:
    value = settings.get(name)
    return value["content"] if isinstance(value, dict) else value


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: what Hugging Face's renderer offers, in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment
