"""A tokenizer of one token per byte, for models that come without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

PAD, BOS, EOS = 0, 1, 2
NAMES = ("<pad>", "<bos>", "<eos>")
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_byte_tokenizer(folder: Path, whole: Sequence[str] = ()) -> int:
    """``tokenizer.json`` and ``tokenizer_config.json``, with a chat template; returns the number of
    tokens: ``NAMES``, one per byte, and ``whole``.

    Args:
        whole: texts that are a token each, such as stop texts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {name: number for number, name in enumerate(NAMES)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    several = [text for text in whole if len(text.encode()) > 1]
    tokenizer.add_special_tokens([*NAMES, *(AddedToken(text, special=True) for text in several)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "pad_token": NAMES[PAD],
        "bos_token": NAMES[BOS],
        "eos_token": NAMES[EOS],
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return tokenizer.get_vocab_size()
