"""Layouts as one word of a command line: ``tp=8,pp=4,ep=32``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout

TRAIN_KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "first", "last")
ROLLOUT_KEYS = ("tp", "dp", "ep", "pp", "a2a", "quantization", "redundant_experts")
A2A = ("none", "deepep")
QUANTIZATIONS = ("none", "block_fp8")


def parse_train(text: str, world: int) -> TrainLayout:
    """``"tp=8,pp=4,last=13,cp=4,ep=32,etp=1"``; a key left out has the layout's default.

    Raises:
        LayoutError: an unknown key or value, a key given twice, or a grid that ``world`` does not
            admit; all faults at once.
    """
    return TrainLayout(world, **_numbers(_pairs("train", text, TRAIN_KEYS), "train"))


def parse_rollout(text: str, world: int) -> RolloutLayout:
    """``"tp=64,dp=8,ep=64,a2a=deepep,quantization=block_fp8"``; as :func:`parse_train`."""
    pairs = _pairs("rollout", text, ROLLOUT_KEYS)
    words = {key: pairs.pop(key, "none") for key in ("a2a", "quantization")}
    faults = [
        f"rollout.{key}: must be one of {', '.join(known)}, is {words[key]!r}"
        f"{_nearest(words[key], known)}"
        for key, known in (("a2a", A2A), ("quantization", QUANTIZATIONS))
        if words[key] not in known
    ]
    return RolloutLayout(
        world,
        **_numbers(pairs, "rollout", faults),
        a2a="deepep" if words["a2a"] == "deepep" else "none",
        quantization="block_fp8" if words["quantization"] == "block_fp8" else "none",
    )


def rollout_text(layout: RolloutLayout) -> str:
    """What :func:`parse_rollout` reads: ``tp`` and what is not the layout's default."""
    default = RolloutLayout(0)
    changed = [k for k in ROLLOUT_KEYS if k == "tp" or getattr(layout, k) != getattr(default, k)]
    return ",".join(f"{key}={getattr(layout, key)}" for key in changed)


def _pairs(side: str, text: str, keys: tuple[str, ...]) -> dict[str, str]:
    out: dict[str, str] = {}
    faults = []
    for word in filter(None, (w.strip() for w in text.split(","))):
        key, sign, value = (part.strip() for part in word.partition("="))
        if not sign or not value:
            faults.append(f"{side}: {word!r} must read key=value, as in {keys[0]}=8")
        elif key not in keys:
            faults.append(f"{side}.{key}: is not a key{_why_not(side, key, keys)}")
        elif key in out:
            faults.append(f"{side}.{key}: is given twice, {out[key]} and {value}")
        else:
            out[key] = value
    if faults:
        raise LayoutError([*faults, f"keys of {side} are {', '.join(keys)}"])
    return out


def _numbers(pairs: dict[str, str], side: str, faults: list[str] | None = None) -> dict[str, int]:
    out = {key: int(value) for key, value in pairs.items() if _is_count(value)}
    bad = [*(faults or []), *_bad_numbers(pairs, side)]
    if bad:
        raise LayoutError(bad)
    return out


def _bad_numbers(pairs: dict[str, str], side: str) -> Iterator[str]:
    for key, value in pairs.items():
        if not _is_count(value):
            yield f"{side}.{key}: must be a whole number of at least 1, is {value!r}"


def _is_count(value: str) -> bool:
    return value.isascii() and value.isdigit() and int(value) >= 1


def _why_not(side: str, key: str, keys: tuple[str, ...]) -> str:
    if side == "train" and key == "dp":
        return "; dp is what is left: ranks / (tp * pp * cp)"
    return _nearest(key, keys)


def _nearest(word: str, words: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
