"""What NCCL does and gloo does not: averages, pieces of unequal sizes, nothing for one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def complete_gloo() -> None:
    """Wrap four functions of ``torch.distributed``; calls that gloo can do pass through."""
    dist: Any = torch.distributed
    dist.all_reduce = _with_average(dist.all_reduce)
    dist.reduce_scatter_tensor = _with_average(dist.reduce_scatter_tensor)
    dist.all_gather = _with_unequal_gather(dist.all_gather)
    dist.reduce_scatter = _with_unequal_scatter(dist.reduce_scatter)

    from megatron.core.distributed import param_and_grad_buffer

    buffers: Any = param_and_grad_buffer  # its own names for the functions above
    buffers.dist_reduce_scatter_func = _idle_alone(dist.reduce_scatter_tensor)
    buffers.dist_all_gather_func = _idle_alone(dist.all_gather_into_tensor)


def _idle_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """In place and with one rank there is nothing to do; gloo copies the whole buffer twice."""

    @functools.wraps(collective)
    def inner(
        output: torch.Tensor, inputs: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        in_place = output.data_ptr() == inputs.data_ptr()
        if in_place and torch.distributed.get_world_size(group) == 1 and not kwargs.get("async_op"):
            return None
        return collective(output, inputs, *args, group=group, **kwargs)

    return inner


def _with_average(collective: Callable[..., Any]) -> Callable[..., Any]:
    dist = torch.distributed

    @functools.wraps(collective)
    def inner(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("op") != dist.ReduceOp.AVG:
            return collective(output, *args, **kwargs)
        if kwargs.get("async_op"):
            raise ValueError("gloo: an asynchronous average is not supported; use the sum")
        kwargs["op"] = dist.ReduceOp.SUM
        work = collective(output, *args, **kwargs)
        output.div_(dist.get_world_size(kwargs.get("group")))
        return work

    return inner


def _unequal(tensors: list[torch.Tensor]) -> bool:
    return any(t.shape != tensors[0].shape for t in tensors)


def _with_unequal_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    dist = torch.distributed

    @functools.wraps(all_gather)
    def inner(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or not _unequal(tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        me = dist.get_rank(group)
        for i, target in enumerate(tensor_list):
            piece = tensor.detach().contiguous() if i == me else target.contiguous()
            source = i if group is None else dist.get_global_rank(group, i)
            dist.broadcast(piece, source, group=group)
            target.copy_(piece)
        return None

    return inner


def _with_unequal_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    dist = torch.distributed

    @functools.wraps(reduce_scatter)
    def inner(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or not _unequal(input_list):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        full = torch.cat([t.detach() for t in input_list])
        dist.all_reduce(full, op=op, group=group)
        sizes = [t.shape[0] for t in input_list]
        output.copy_(torch.split(full, sizes)[dist.get_rank(group)])
        return None

    return inner
