"""The engine's weights as its host sees them: updates, sleep, and whether they may be used.

Weights are invalid until an update has completed, again as soon as the next one begins, and after
a sleep. A read leaves them as they are. One update is one begin, one loader call that stays open
while the rank drives its rounds, and one end; SGLang's begin and end are quick, and its loader call
flushes the prefix cache but in a read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)

from rlhf.rollout.engine import EngineSpec
from rlhf.rollout.engine_state import EnginePart, EngineParts, EngineState, Need, Use
from rlhf.rollout.sglang_engine import loader_payloads

LOADER_GRACE_S = 10.0
"""Time that a loader call has, after its limit, to return."""
SLEEP_LIMIT_S = 60.0
TAGS: Mapping[EnginePart, tuple[str, ...]] = {
    "weights": ("weights",),
    "kv_cache": ("kv_cache", "cuda_graph"),  # both are of use to a generation only
}
"""What SGLang calls the parts."""

Messages = Sequence[dict[str, Any]]


class EngineWeights:
    """All that changes weights goes through here."""

    def __init__(self, manager: Any, spec: EngineSpec, die: Callable[[str], NoReturn]) -> None:
        """``manager`` is SGLang's tokenizer manager, ``die`` ends the process with a cause."""
        self._manager = manager
        self._spec = spec
        self._die = die
        self._update: asyncio.Task[None] | None = None
        self._limit_s = 0.0
        self.loading = False
        """A loader call is open: the schedulers do nothing else."""
        self.state = EngineState()

    @property
    def is_busy(self) -> bool:
        return self.loading or (self._update is not None and not self._update.done())

    def begin(
        self,
        messages: Messages,
        limit_s: float,
        on_failure: Callable[[str], None],
        *,
        reads: bool = False,
    ) -> None:
        """Open an update, or a read; ``on_failure`` hears of an end that nobody asked for."""

        async def update() -> None:
            try:
                await self._load(messages, flush_cache=not reads)
            except Exception as error:
                self.state.fail(str(error))
                on_failure(f"{type(error).__name__}: {error}")
                raise

        self.state.begin(reads=reads)
        self._limit_s = limit_s
        self._update = asyncio.get_running_loop().create_task(update())

    async def end(self, version: int | None) -> None:
        """Wait for the open update; with a version the weights are valid from here on.

        After a read they are valid too, and of the version that they were.

        Raises:
            RuntimeError: there is none, or SGLang refused a part of it.
        """
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("end_update without begin_update")
        await self._returned(update, self._limit_s)
        if version is not None and not self.state.reads:
            await self._manager.update_weight_version(
                UpdateWeightVersionReqInput(new_version=str(version))
            )
        self.state.complete(version)

    async def call(self, messages: Messages, limit_s: float) -> None:
        """A complete loader call; does not change whether the weights are valid."""
        load = asyncio.get_running_loop().create_task(self._load(messages))
        await self._returned(load, limit_s)

    async def sleep(self, parts: EngineParts) -> None:
        """Release device memory; on a CPU, where SGLang frees nothing, the receiver frees that of
        the weights."""
        fresh = self.state.release(parts)
        if self._on_host:
            if "weights" in fresh:
                message = {"op": "sleep", "free": self._spec.free_host_weights}
                await self.call([message] * self._spec.num_ranks, SLEEP_LIMIT_S)
        elif fresh:
            await self._manager.release_memory_occupation(
                ReleaseMemoryOccupationReqInput(tags=_tags(fresh))
            )
        self.state.released(fresh)

    async def wake(self, parts: EngineParts) -> None:
        """Take device memory back; the weights wait for an update."""
        fresh = self.state.resume(parts)
        if fresh and not self._on_host:
            await self._manager.resume_memory_occupation(
                ResumeMemoryOccupationReqInput(tags=_tags(fresh))
            )

    def refusal(self, use: Use) -> str:
        """Why it cannot be done now; empty: it can."""
        missing = self.state.missing(use, on_host=self._on_host)
        if missing is None:
            return ""
        if missing is Need.WEIGHT_SYNC:
            return (
                f"{_verb(use)} refused: engine weights are not valid ({self.state.invalid}); "
                "complete an update first"
            )
        return f"{_verb(use)} refused: the engine sleeps; needs {missing} first"

    def check(self, use: Use) -> None:
        """
        Raises:
            RuntimeError: it cannot be done now.
        """
        if refusal := self.refusal(use):
            raise RuntimeError(refusal)

    @property
    def _on_host(self) -> bool:
        return self._spec.device == "cpu"

    async def _returned(self, load: asyncio.Task[None], limit_s: float) -> None:
        limit_s += LOADER_GRACE_S
        done, _ = await asyncio.wait({load}, timeout=limit_s)
        if not done:
            self._die(f"a scheduler did not return from the loader within {limit_s:.0f} s")
        load.result()

    async def _load(self, messages: Messages, *, flush_cache: bool = True) -> None:
        """One begin, one loader call in every scheduler, one end."""
        if len(messages) != self._spec.num_ranks:
            raise ValueError(
                f"{len(messages)} loader messages for {self._spec.num_ranks} ranks of the engine"
            )
        self.check(Use.UPDATE)
        self.loading = True
        try:
            begun = await self._manager.begin_weight_update(
                BeginWeightUpdateReqInput(selector="target")
            )
            _check("begin_weight_update", begun)
            loaded = [await self._call_loader(messages, flush_cache)]
            if self._spec.pp > 1:  # that one has returned while stages still work
                join = [{"op": "join"}] * self._spec.num_ranks
                loaded.append(await self._call_loader(join, flush_cache))
            ended = await self._manager.end_weight_update(EndWeightUpdateReqInput())
            for result in loaded:
                _check("loader", result)
            _check("end_weight_update", ended)
        finally:
            self.loading = False

    async def _call_loader(self, messages: Messages, flush_cache: bool) -> tuple[bool, str]:
        """SGLang picks the payload by tp rank: those of its stages travel together."""
        tp = self._spec.tp
        payloads = [
            {"stages": messages[t::tp]} if self._spec.pp > 1 else messages[t] for t in range(tp)
        ]
        return await self._manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=loader_payloads([json.dumps(p) for p in payloads]),
                load_format=self._spec.receiver,
                flush_cache=flush_cache,
                selector="target",
            )
        )


def _tags(parts: EngineParts) -> list[str]:
    return [tag for part in sorted(parts) for tag in TAGS[part]]


def _verb(use: Use) -> str:
    return use.value.partition(" ")[0]


def _check(step: str, result: tuple[bool, str]) -> None:
    ok, text = result
    if not ok:
        raise RuntimeError(f"{step} failed: {text}")
