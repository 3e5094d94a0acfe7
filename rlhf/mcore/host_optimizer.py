"""Masters and moments in host memory; an update takes them through the device chunk by chunk.

Megatron's DistributedOptimizer decides which elements are this rank's, reduces and clips their
gradients, and its Adam is the kernel. Only the memory of its shards is elsewhere: its float32
masters keep shape and gradient, but their storage is empty; their values and both moments are rows
of one tensor on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.mcore.lanes import stream
from rlhf.memory.chunks import Chunk, Span, buffer_elements, cut
from rlhf.memory.host import host_zeros, unlock

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Shard:
    """Elements of a parameter whose state is on this rank."""

    part: int
    group: int
    index: int
    """Of its parameter in ``param_groups[group]["params"]`` of the part's Adam."""
    param: Tensor
    """[n] float32: its ``grad`` is where Megatron puts the gradient. A master without memory, or of
    a float32 model the weights."""
    weights: Tensor | None
    """[n] in the dtype of the model; None if ``param`` is the weights."""
    begin: int
    """Of the first element in the rows of the host."""

    @property
    def place(self) -> slice:
        return slice(self.begin, self.begin + self.param.numel())


class HostState:
    """The state of all of a model's optimizers."""

    on_host = True

    def __init__(
        self, parts: Sequence[Any], chunks: Sequence[Any], device: torch.device, buffer_bytes: int
    ) -> None:
        """Take the masters of ``parts`` away from the device; their moments must not exist yet.

        Args:
            parts: DistributedOptimizers.
            chunks: the model's, wrapped for gradients.
            buffer_bytes: at most so many for each of two buffers on the device, which exist while
                the state passes through.

        Raises:
            ValueError: a buffer is too small.
            RuntimeError: memory of the host cannot be locked for the device.
        """
        self._parts = parts
        self._chunks = chunks
        self._device = device
        self._shards = list(_shards(parts))
        has_masters = {shard.weights is not None for shard in self._shards}
        assert len(has_masters) <= 1, "float32 weights among others"
        self._has_masters = True in has_masters
        sizes = [shard.param.numel() for shard in self._shards]
        self._sizes = buffer_elements(sum(sizes), buffer_bytes, self._num_rows * FLOAT32_BYTES)
        self._order = cut(sizes, self._sizes)
        self.rows = host_zeros(self._num_rows, sum(sizes), device)
        if device.type == "cuda":
            weakref.finalize(self, unlock, self.rows)
        if self._has_masters:
            for shard in self._shards:
                self.rows[0, shard.place].copy_(shard.param.detach())
                shard.param.untyped_storage().resize_(0)

    @property
    def _num_rows(self) -> int:
        """Masters, if there are any, and two moments."""
        return 3 if self._has_masters else 2

    def buffers(self) -> list[Tensor]:
        """New ones, [rows, elements] each; what an update takes on the device."""
        return [
            torch.empty(self._num_rows, size, dtype=torch.float32, device=self._device)
            for size in self._sizes
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Adam on this rank's shards, from the gradients that are ready.

        The weights follow; then they are gathered unless that overlaps the next forward pass.
        Collective over data parallel ranks.
        """
        groups = [group for part in self._parts for group in part.optimizer.param_groups]
        step = 1 + max((group.get("step", 0) for group in groups), default=0)

        def work(chunk: Chunk, rows: Tensor) -> None:
            for number, part in enumerate(self._parts):
                self._adam(part.optimizer, number, chunk, rows, step)
            self._write(chunk, rows)

        stream(self.rows, self._order, self.buffers(), work, keep=True)
        for group in groups:
            group["step"] = step
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()

    def _adam(self, adam: Any, part: int, chunk: Chunk, rows: Tensor, step: int) -> None:
        """The optimizer's own kernel, on the chunk in place of its parameters."""
        params: dict[int, list[Tensor]] = {}
        state = {}
        for span in chunk.spans:
            shard = self._shards[span.shard]
            if shard.part == part:
                param = self._updated(span, rows)
                assert shard.param.grad is not None, "gradients are not ready"
                param.grad = shard.param.grad.detach()[span.start : span.stop]
                moments = rows[-2:, span.offset : span.offset + span.length]
                state[param] = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
                params.setdefault(shard.group, []).append(param)
        if not params:
            return
        own = adam.param_groups, adam.state
        adam.param_groups = [
            # it counts its steps in the group; this is the same step for all chunks
            {**own[0][group], "params": found, "step": step - 1}
            for group, found in params.items()
        ]
        adam.state = state
        try:
            adam.step()
        finally:
            adam.param_groups, adam.state = own

    def _updated(self, span: Span, rows: Tensor) -> Tensor:
        """What Adam changes: the master in the buffer, or the weights themselves."""
        if self._has_masters:
            return rows[0, span.offset : span.offset + span.length]
        return self._shards[span.shard].param.detach()[span.start : span.stop]

    def _write(self, chunk: Chunk, rows: Tensor) -> None:
        """The weights of a chunk from its masters."""
        for span in chunk.spans:
            weights = self._shards[span.shard].weights
            if weights is not None:
                weights[span.start : span.stop].copy_(self._updated(span, rows))

    @torch.no_grad()
    def write_shards(self) -> None:
        """This rank's shards of the weights, from the masters, which must exist."""
        assert self._has_masters, "a float32 model has no masters"
        buffers = [buffer[:1] for buffer in self.buffers()]
        stream(self.rows[:1], self._order, buffers, self._write, keep=False)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, Megatron's optimizers have masters and moments as if they had stayed.

        They are the host's own tensors: what is written to them is kept.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # copies of the last update
        for shard in self._shards:
            adam = self._parts[shard.part].optimizer
            value = self.rows[0, shard.place] if self._has_masters else shard.param
            adam.param_groups[shard.group]["params"][shard.index] = value
            moments = self.rows[-2:, shard.place]
            adam.state[value] = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
        try:
            yield
        finally:
            for shard in self._shards:
                adam = self._parts[shard.part].optimizer
                adam.param_groups[shard.group]["params"][shard.index] = shard.param
                adam.state.clear()


def _shards(parts: Sequence[Any]) -> Iterator[_Shard]:
    """In the order of the parameter groups of all parts."""
    begin = 0
    for number, part in enumerate(parts):
        weights = {
            id(master): weights
            for masters, shards in zip(
                part.shard_fp32_from_float16_groups, part.shard_float16_groups, strict=True
            )
            for master, weights in zip(masters, shards, strict=True)
        }
        for group, settings in enumerate(part.optimizer.param_groups):
            for index, param in enumerate(settings["params"]):
                yield _Shard(number, group, index, param, weights.get(id(param)), begin)
                begin += param.numel()
