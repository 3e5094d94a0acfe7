"""Model, optimizer and random state in megatron's distributed format.

A checkpoint written by one layout loads into any other. Files are written by the ranks themselves:
megatron's own writer forks processes out of a rank and waits for them without a limit.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # noqa: F401  megatron's writer fails without it
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException

from rlhf.dist.layout import TrainLayout
from rlhf.mcore.model import TrainModel
from rlhf.mcore.optimizer import Optimizer

STATE_KINDS = ("param", "exp_avg", "exp_avg_sq")
"""Masters and Adam's moments, by megatron's names."""


def save_state(folder: Path, model: TrainModel, optimizer: Optimizer) -> None:
    """Write everything into ``folder``, which must exist and be empty.

    Collective over all ranks; returns when all files are on disk.

    Raises:
        RuntimeError: a rank could not write; raised on every rank, with the causes on rank 0.
    """
    optimizer.wait_params()
    model_state = _model_state(model)
    moments = _moments(model_state, optimizer, is_loading=False)
    # megatron takes an empty dictionary for a value, and warns that ranks differ in it
    moments = {i: params for i, params in moments.items() if params}
    state = {
        **model_state,
        **({"optimizer": moments} if moments else {}),
        "random": _random_state(model.layout),
        "common": {
            "layout": asdict(model.layout),
            "num_updates": optimizer.num_updates,
            "adam_step": _adam_step(optimizer),
        },
    }
    _write(folder, state)


def load_state(folder: Path, model: TrainModel, optimizer: Optimizer) -> None:
    """Restore what :func:`save_state` wrote, by any layout.

    Random states come back if the layout is the one that wrote them; otherwise the seeds stay.
    Collective over all ranks.
    """
    common = dist_checkpointing.load_common_state_dict(str(folder))["common"]
    model_state = _model_state(model)
    state = {
        **model_state,
        "optimizer": _moments(model_state, optimizer, is_loading=True),
    }
    same_layout = common["layout"] == asdict(model.layout)
    if same_layout:
        state["random"] = _random_state(model.layout)
    loaded = dist_checkpointing.load(state, str(folder))
    _set_weights(model, loaded)
    _set_moments(optimizer, loaded["optimizer"], common["adam_step"])
    optimizer.num_updates = common["num_updates"]
    if same_layout:
        _set_random_state(loaded["random"])


def save_weights(folder: Path, model: TrainModel) -> None:
    """Only the weights, into an existing, empty folder. Collective over all ranks."""
    _write(folder, _model_state(model))


def load_weights(folder: Path, model: TrainModel) -> None:
    """Only the weights, into a model of any layout. Collective over all ranks."""
    _set_weights(model, dist_checkpointing.load(_model_state(model), str(folder)))


def _moments(
    model_state: dict[str, Any], optimizer: Optimizer, *, is_loading: bool
) -> dict[int, Any]:
    """Adam's moments and float32 masters, by the names of the weights.

    With experts over ranks megatron has two optimizers, else one, and its own form differs between
    the two; this one has nothing of them but tensors. They are copies in host memory of the shards
    of all data parallel ranks. Every one of these ranks has them, gathered by the device. With a
    state on the host they are gathered there instead, and while saving only the rank that writes
    them has them.
    """
    on_host = {"distrib_optim_fully_reshardable_mem_efficient": optimizer.state.on_host}
    with optimizer.state.shown():
        moments = {
            i: part.sharded_param_state_fully_reshardable(
                model_state, is_loading, _metadata() | on_host
            )
            or {}
            for i, part in enumerate(optimizer.inner.chained_optimizers)
        }
    if not is_loading:
        _separate(moments)
    return moments


def _separate(moments: dict[int, Any]) -> None:
    """Memory of its own for each tensor that this rank writes, none for the others.

    They are views of what was gathered, one tensor for all masters of a buffer, one for each of its
    moments. megatron's writer copies views before it writes any, and everything would be there
    twice. So they are copied here, kind by kind, and what was gathered of a kind then goes.
    """
    apply_factories(moments)
    for kind in STATE_KINDS:
        for params in moments.values():
            for tensors in params.values():
                for held in nested_values({kind: tensors[kind]}):
                    writes = is_main_replica(held.replica_id)
                    held.data = held.data.clone() if writes else held.data.to("meta")


def _adam_step(optimizer: Optimizer) -> int:
    """Updates so far that were not left out; the same in all groups that have parameters."""
    return max(group.get("step", 0) for group in optimizer.inner.param_groups)


def _set_moments(optimizer: Optimizer, loaded: Mapping[int, Any], adam_step: int) -> None:
    for group in optimizer.inner.param_groups:
        group["step"] = adam_step
    with optimizer.state.shown():
        for i, part in enumerate(optimizer.inner.chained_optimizers):
            part.load_parameter_state_from_fully_reshardable(loaded[i])


def _metadata() -> dict[str, Any]:
    return {
        # The default is a format that cannot be read back.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(model: TrainModel) -> dict[str, Any]:
    """All virtual chunks in one dictionary: they must be saved and loaded in one call."""
    return {
        f"model{i}": decoder.sharded_state_dict(metadata=_metadata())
        for i, decoder in enumerate(model.decoders)
    }


def _set_weights(model: TrainModel, loaded: Mapping[str, Any]) -> None:
    for i, decoder in enumerate(model.decoders):
        decoder.load_state_dict(loaded[f"model{i}"])


def _random_state(layout: TrainLayout) -> ShardedObject:
    rank = torch.distributed.get_rank()
    state = {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("random", state, (layout.world,), (rank,))


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["host"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _write(folder: Path, state: dict[str, Any]) -> None:
    """megatron's plan and format; this thread writes."""
    results: queue.Queue = queue.Queue()
    # megatron keeps its queue here and would otherwise spawn a manager process for it
    writer_module: Any = filesystem_async
    writer_module._results_queue = results
    request = dist_checkpointing.save(
        state,
        str(folder),
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
        async_sharded_save=True,
    )
    if request.async_fn is not None:
        results.put(_write_buckets(request))
    try:
        for finalize in request.finalize_fns:
            finalize()
    except CheckpointException as failure:  # not an Exception: it would pass most handlers
        causes = "; ".join(f"rank {rank}: {e[0]}" for rank, e in failure.failures.items())
        raise RuntimeError(
            f"checkpoint {folder} could not be written: {causes or 'rank 0 knows the cause'}"
        ) from failure


def _write_buckets(request: Any) -> dict[int, list] | Exception:
    """What megatron's writer processes answer: results by bucket, or the first error."""
    transforms = request.async_fn.args[0]
    done: dict[int, list] = {}
    for i, bucket in enumerate(request.preload_fn()):
        answers: queue.Queue = queue.Queue()
        pending: queue.Queue = queue.Queue()
        pending.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, i, bucket, answers, pending, use_fsync=True
        )
        _, result = answers.get_nowait()
        if isinstance(result, Exception):
            return result
        done[i] = result
    return done
