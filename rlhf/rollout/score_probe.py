"""One fixed prompt, scored by the trainer after its update and by the engine before its rollout.

Checksums say that bytes arrived; this says that trainer and engine make the same of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf.config.schema import ReshardSection
from rlhf.rollout.engine import RolloutEngine, SampleRequest
from rlhf.types import MicroBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbeGap:
    """Distances of the two log-probabilities of each token but the first."""

    mean: float
    max: float
    num_tokens: int
    alarm: bool


def probe_tokens(seed: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """The prompt of a run: token ids that depend on nothing but the arguments."""
    data = hashlib.shake_128(f"probe|{seed}".encode()).digest(8 * num_tokens)
    return tuple(int(n) for n in np.frombuffer(data, ">u8") % vocab_size)


def probe_batch(
    token_ids: Sequence[int], align: int, copies: int, device: torch.device
) -> list[MicroBatch]:
    """The prompt as a sequence whose every token but the first is asked for.

    Args:
        align: the sequence is padded to a multiple of this.
        copies: micro-batches, all the same: a schedule may need several.
    """
    length = len(token_ids)
    padded = -(-length // align) * align
    tokens = torch.zeros(padded, dtype=torch.int64)
    tokens[:length] = torch.tensor(token_ids)
    mask = torch.zeros(padded, dtype=torch.bool)
    mask[1:length] = True
    micro = MicroBatch(
        tokens=tokens.to(device),
        positions=torch.arange(padded, device=device),
        mask=mask.to(device),
        cu_seqlens=torch.tensor([0, padded], dtype=torch.int32, device=device),
        columns={},
    )
    return [micro] * copies


class ScoreProbe:
    """Remembers the trainer's scores until the engine has given its own."""

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        score: Callable[[], Tensor],
        engine: RolloutEngine | None,
        config: ReshardSection,
        on_gap: Callable[[ProbeGap], None],
    ) -> None:
        """
        Args:
            score: log-probabilities by the trainer, those of ``token_ids`` at the same places;
                collective over all ranks.
            engine: None on ranks that do not lead one; there no gap is seen.
        """
        self._token_ids = tuple(token_ids)
        self._score = score
        self._engine = engine
        self._config = config
        self._on_gap = on_gap
        self._trained: list[float] = []

    def score_trained(self) -> None:
        """By the weights that go to the engines next. Collective over all ranks."""
        if self._token_ids:
            self._trained = self._score()[1 : len(self._token_ids)].tolist()

    def compare(self, step: int, timeout_s: float) -> None:
        """Ask the engine, once after each scoring.

        Raises:
            RuntimeError: the mean distance is above the alarm and the run shall stop.
        """
        trained, self._trained = self._trained, []
        if self._engine is None or not trained:
            return
        request = SampleRequest(
            key=0,
            token_ids=self._token_ids,
            seed=0,
            max_new_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprobs=True,
        )
        (answer,) = self._engine.generate([request], lambda _: None, timeout_s)
        assert answer.prompt_logprobs is not None
        gap = _gap(trained, answer.prompt_logprobs, self._config.probe_alarm)
        self._on_gap(gap)
        if gap.alarm:
            self._alarm(step, gap)

    def _alarm(self, step: int, gap: ProbeGap) -> None:
        text = (
            f"step {step}: trainer and engine score the probe's {gap.num_tokens} tokens "
            f"{gap.mean:.3g} apart on average, {gap.max:.3g} at most; more than "
            f"reshard.probe_alarm={self._config.probe_alarm:g}, the engine may hold other weights"
        )
        if self._config.probe_stop:
            raise RuntimeError(text)
        logger.warning(text)


def _gap(trained: Sequence[float], served: Sequence[float], alarm: float) -> ProbeGap:
    distances = np.abs(np.array(trained) - np.array(served))
    mean = float(distances.mean())
    # a NaN is above every threshold
    return ProbeGap(mean, float(distances.max()), len(distances), not mean <= alarm)
