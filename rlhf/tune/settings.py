"""Which settings are tuned, and which values of each are tried. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf.config.schema import Config
from rlhf.dist.layout import RolloutLayout, TrainLayout

MICROBATCH = "train.tokens_per_microbatch"
WINDOW = "reshard.window_mib"
CONCURRENCY = "rollout.max_running_requests"
KV_TOKENS = "rollout.kv_tokens"
KV_SHARE = "rollout.mem_fraction"
FACTORS = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0)
WINDOW_FACTORS = (0.5, 2.0, 4.0)
SMALLEST_WINDOW_MIB = 4
SHARES = (-0.1, 0.1)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration and what is tried for it, the value it has first."""

    key: str
    values: tuple[float, ...]
    phases: tuple[str, ...]
    """Those whose seconds it changes; names are beginnings."""
    why_none: str = ""
    """There is nothing to try, because ..."""

    @property
    def current(self) -> float:
        return self.values[0]

    def override(self, value: float) -> str:
        """As a person writes it."""
        return f"{self.key}={value:g}" if value != int(value) else f"{self.key}={int(value)}"


def microbatch_setting(config: Config, train: TrainLayout, step_tokens: float) -> Setting:
    """From the longest sequence to the first size that holds all tokens of a replica's update.

    Args:
        step_tokens: of all prompts and answers of a step, at most.
    """
    current = config.train.tokens_per_microbatch
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    most = max(step_tokens / train.dp / config.batch.updates_per_step, longest)
    tried = [v for factor in FACTORS if (v := current * factor) >= longest]
    smaller, whole = [v for v in tried if v < most], [v for v in tried if v >= most]
    values = _distinct(current, smaller + (whole[:1] if current < most else []))
    return Setting(
        MICROBATCH,
        values,
        ("pack", "score", "update"),
        "" if len(values) > 1 else f"no other size holds a sequence of {longest} tokens",
    )


def window_setting(config: Config, moved_bytes: float) -> Setting:
    """Up to a window that all of a rank's share passes in one round.

    Args:
        moved_bytes: to or from the busiest rank.
    """
    current = config.reshard.window_mib
    tried = [current * factor for factor in WINDOW_FACTORS]
    most = 4 * moved_bytes / 2**20
    values = _distinct(current, (v for v in tried if SMALLEST_WINDOW_MIB <= v <= most))
    none = "" if len(values) > 1 else "all that moves passes in one round"
    return Setting(WINDOW, values, ("reshard",), none)


def concurrency_setting(config: Config, rollout: RolloutLayout) -> Setting:
    """Answers that an engine decodes at a time: up to its share of a step."""
    batch, current = config.batch, config.rollout.max_running_requests
    share = -(-batch.prompts_per_step // rollout.num_engines) * batch.samples_per_prompt
    if config.rollout.deterministic:
        return Setting(
            CONCURRENCY,
            (current,),
            ("rollout",),
            f"rollout.deterministic admits an engine's whole share of {share} at once",
        )
    values = _distinct(current, (v for v in (current / 2, current * 2, share) if 1 <= v <= share))
    none = "" if len(values) > 1 else f"an engine has {share} answers in a step"
    return Setting(CONCURRENCY, values, ("rollout",), none)


def cache_setting(config: Config, rollout: RolloutLayout, sequence_tokens: float) -> Setting:
    """Tokens of the KV cache, up to what all running answers need; or the device's share of it.

    Args:
        sequence_tokens: of a prompt with its answer, in the mean.
    """
    section, batch = config.rollout, config.batch
    share = -(-batch.prompts_per_step // rollout.num_engines) * batch.samples_per_prompt
    running = min(share, section.max_running_requests)
    if section.kv_tokens is None:
        current = section.mem_fraction
        values = _distinct(current, (v for d in SHARES if 0.1 <= (v := current + d) <= 0.9))
        return Setting(KV_SHARE, tuple(round(v, 2) for v in values), ("rollout",))
    need = 1.25 * running * sequence_tokens
    values = _distinct(section.kv_tokens, (v for v in (2 * section.kv_tokens,) if v / 2 < need))
    none = "" if len(values) > 1 else f"{running} answers of {sequence_tokens:.0f} tokens fit"
    return Setting(KV_TOKENS, values, ("rollout",), none)


def seconds_of(phases: Sequence[str], seconds: dict[str, float]) -> float:
    """Sum over the phases whose names begin so."""
    return sum(s for name, s in seconds.items() if name.startswith(tuple(phases)))


def _distinct(current: float, others: Iterable[float]) -> tuple[float, ...]:
    whole = current == int(current)
    found = dict.fromkeys([current, *(int(v) if whole else v for v in others)])
    return tuple(found)
