"""Passes over packed micro-batches: log-probabilities, values, and one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlhf.mcore import moe
from rlhf.mcore.context import cut
from rlhf.mcore.model import TrainModel
from rlhf.mcore.optimizer import Optimizer
from rlhf.mcore.parallel import Groups, current_groups
from rlhf.mcore.spec import choose_kernels
from rlhf.mcore.stage_waits import StageWaits
from rlhf.mcore.stream import Stream, fold, keep_whole
from rlhf.types import MicroBatch

LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [n], entropy [n], columns [n]), with a value head (values [n], columns [n]) ->
(loss, sums to add up over all micro-batches)."""


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Of one update; equal on all ranks."""

    grad_norm: float
    ok: bool
    lr: float
    sums: Mapping[str, float]  # the loss function's, summed over micro-batches and dp
    expert_loads: Tensor | None
    """[layers with experts, experts] float64: how many tokens of the trained sequences each expert
    saw. None: no experts."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A micro-batch in the form that the model takes."""

    stream: Stream
    places: Tensor  # [n] int64, packed index of the tokens that the head's outputs belong to
    columns: Mapping[str, Tensor]  # [n]


def logprobs(model: TrainModel, micro: Sequence[MicroBatch], temperature: float) -> Tensor:
    """log p of the trained tokens, divided by ``temperature`` before the softmax; no gradient.

    Returns:
        [sum T] float32 over all micro-batches back to back, zero where ``mask`` is False; the same
        on every rank of the replica. Empty without micro-batches.

    Collective over the ranks of one replica: transfers between stages, and a broadcast from the
    last stage.
    """
    return _score(model, micro, [_prepare(m, model) for m in micro], temperature)


def values(model: TrainModel, micro: Sequence[MicroBatch], asked: Sequence[Tensor]) -> Tensor:
    """Of a model with a value head: the value of the state after each token that is asked for.

    Args:
        asked: [T] bool for each micro-batch.

    Returns:
        [sum T] float32, at t the value after the tokens up to and with t, zero where not asked for;
        otherwise as :func:`logprobs`, collectives included.
    """
    return _score(model, micro, [_prepare(m, model, a) for m, a in zip(micro, asked, strict=True)])


def train(
    model: TrainModel,
    optimizer: Optimizer,
    micro: Sequence[MicroBatch],
    loss_fn: LossFn,
    temperature: float = 1.0,
    *,
    gather_params: bool = True,
) -> TrainStats:
    """Forward and backward over all micro-batches, then one optimizer step.

    ``loss_fn`` gets the trained tokens of one micro-batch in order, columns included (a value is
    that of the state before the token; it has no temperature); its loss is already divided by
    global denominators. Gradients are summed over micro-batches, data and context parallel ranks,
    nothing is averaged. Micro-batches may differ in length, also between replicas; one without
    trained tokens is fine. Under context parallelism all ranks of a replica compute its loss, and
    each has the gradient of its own rows.

    ``gather_params=False``: the caller knows that another pass of this model comes before anything
    reads the parameters; with ``train.overlap`` they are then gathered during that pass.

    Collective over all ranks.

    Raises:
        AssertionError: the number of micro-batches differs between data parallel ranks.
    """
    groups = current_groups()
    _check_counts(len(micro), groups, model)
    prepared = [_prepare(m, model) for m in micro]
    optimizer.zero_grad()
    if model.shape.moe is not None:
        moe.begin_update(model.decoders, [p.stream.members for p in prepared], model.layout.cp)
    sums = _run(model, prepared, partial(_loss, loss_fn), temperature, forward_only=False)
    step = optimizer.step()
    loads = _count_loads(model, update_biases=step.ok)
    if gather_params:
        optimizer.wait_params()
    return TrainStats(
        grad_norm=step.grad_norm,
        ok=step.ok,
        lr=step.lr,
        sums=_add_up(sums, groups, model.stage_waits),
        expert_loads=loads,
    )


def _count_loads(model: TrainModel, *, update_biases: bool) -> Tensor | None:
    """Of the update that ends; the biases of the experts follow it."""
    if model.shape.moe is None:
        return None
    loads = moe.expert_loads(model.decoders, model.shape.num_layers, model.shape.moe.num_experts)
    if update_biases:
        moe.update_biases(model.decoders, loads, model.train.moe)
    return loads[model.shape.moe.first_dense :]


def _score(
    model: TrainModel,
    micro: Sequence[MicroBatch],
    prepared: Sequence[_Prepared],
    temperature: float = 1.0,
) -> Tensor:
    """The head's first output where it belongs, zero elsewhere: [sum T] on every stage."""
    if not micro:
        return torch.zeros(0, device=model.device)
    groups = current_groups()
    with torch.no_grad(), _evaluating(model):
        outputs = _run(model, prepared, _keep_first, temperature, forward_only=True)
    out = torch.zeros(sum(len(m.tokens) for m in micro), device=model.device)
    nothing: list[Any] = [None] * len(micro)
    start = 0
    for m, batch, output in zip(micro, prepared, outputs or nothing, strict=True):
        if output is not None:
            out[start + batch.places] = output["first"]
        start += len(m.tokens)
    if groups.pp.size() > 1:
        with model.stage_waits.waiting():
            torch.distributed.broadcast(out, groups.last_stage, group=groups.pp)
    return out


@contextmanager
def _evaluating(model: TrainModel) -> Iterator[None]:
    for chunk in model.chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model.chunks:
            chunk.train()


def _prepare(micro: MicroBatch, model: TrainModel, asked: Tensor | None = None) -> _Prepared:
    """For the trained tokens, or for the tokens that are asked for."""
    places = (micro.mask if asked is None else asked).nonzero().squeeze(1)
    engine_attention = choose_kernels(model.config.params_dtype).engine_attention
    if model.layout.cp > 1:
        group = current_groups().cp
        short = None if engine_attention else _short_tokens(model)
        stream = cut(micro, group.size(), group.rank(), short, asked)
    elif engine_attention:
        stream = keep_whole(micro, asked)
    else:
        multiple = model.layout.tp if model.config.sequence_parallel else 1
        stream = fold(micro, multiple, _short_tokens(model), asked)
    columns = {name: column[places] for name, column in micro.columns.items()}
    return _Prepared(stream, places, columns)


def _short_tokens(model: TrainModel) -> int:
    """Sequence length up to which plain products beat torch's attention kernel (measured)."""
    if model.device.type != "cpu":
        return 0
    return 64 if model.config.params_dtype == torch.float32 else 256


def _run(
    model: TrainModel,
    prepared: Sequence[_Prepared],
    consume: Callable[[_Prepared, tuple[Tensor, ...]], tuple[Tensor, dict[str, Tensor]]],
    temperature: float,
    *,
    forward_only: bool,
) -> list[dict[str, Tensor]]:
    """megatron's schedule; what ``consume`` returned per micro-batch on the last stage, else []."""
    assert prepared, "a pass needs at least one micro-batch"
    assert temperature > 0, f"log-probabilities need a temperature above 0, got {temperature}"

    def step(batches: Iterator[_Prepared], chunk: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(batches)
        output = chunk(batch.stream, temperature)

        def finish(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, kept = consume(batch, output)
            # The middle one is a token count, by which megatron would divide; see model._finalize.
            return loss, torch.zeros([], dtype=torch.int), kept

        return output, finish

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(prepared) for _ in model.chunks],
        model=list(model.chunks),
        num_microbatches=len(prepared),
        seq_length=prepared[0].stream.tokens.shape[
            1
        ],  # of no effect: lengths travel with the tensors
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _keep_first(batch: _Prepared, output: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    return output[0].new_zeros([]), {"first": output[0]}


def _loss(
    loss_fn: LossFn, batch: _Prepared, output: tuple[Tensor, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, sums = loss_fn(*output, dict(batch.columns))
    if not len(output[0]):
        # A loss of no tokens may be a constant; stages and hooks wait for its gradient still.
        loss = loss + output[0].sum()
    return loss, {name: value.detach() for name, value in sums.items()}


def _check_counts(num_micro: int, groups: Groups, model: TrainModel) -> None:
    counts = torch.tensor([num_micro, -num_micro], device=model.device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=groups.dp)
    most, fewest = counts[0].item(), -counts[1].item()
    assert most == fewest, (
        f"micro-batches must be equal in number on all data parallel ranks, got {fewest} to {most}"
    )
    num_stages = groups.pp.size()
    assert len(model.chunks) == 1 or num_micro % num_stages == 0, (
        f"with virtual stages the number of micro-batches, {num_micro}, must be a multiple of "
        f"pp={num_stages}"
    )


def _add_up(
    per_micro: list[dict[str, Tensor]], groups: Groups, waits: StageWaits
) -> dict[str, float]:
    """Sums over micro-batches and dp, from the last stage to all ranks."""
    total: list[Any] = [None]
    if groups.is_last_stage:
        names = sorted(per_micro[0])
        assert all(sorted(sums) == names for sums in per_micro), "sums differ in their names"
        values = torch.stack(
            [torch.stack([sums[name].double() for name in names]) for sums in per_micro]
        ).sum(0)
        torch.distributed.all_reduce(values, group=groups.dp)
        total = [dict(zip(names, values.tolist(), strict=True))]
    if groups.pp.size() > 1:
        with waits.waiting():
            torch.distributed.broadcast_object_list(total, groups.last_stage, group=groups.pp)
    result: dict[str, float] = total[0]
    return result
