"""An optimizer state on the host against one on the device, from the same gradients."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rlhf.bench.gpu.check import Figures, Sizes, one_rank, require
from rlhf.bench.gpu.model import CONFIG, fill_weights
from rlhf.config.schema import ModelSection, OptimizerSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.mcore import parallel
from rlhf.mcore.host_optimizer import HostState
from rlhf.mcore.lanes import stream
from rlhf.mcore.model import TrainModel, build_model
from rlhf.mcore.optimizer import Optimizer, build_optimizer
from rlhf.memory.chunks import Chunk, buffer_elements, cut
from rlhf.memory.host import host_zeros, unlock
from rlhf.platform import megatron_cpu
from rlhf.weights.model_shape import parse_model_shape

NUM_UPDATES = 3
BUFFER_BYTES = 12 * 50_000
"""Many chunks for the model, and cuts inside its matrices."""
NUM_BUFFERS_FULL = 9
SETTINGS = OptimizerSection(lr=1e-3, clip_grad=1.0, weight_decay=0.1)


def check_host_state(device: torch.device, sizes: Sizes) -> Figures:
    """Weights, masters and moments are equal bit by bit; copies go both ways at ``gb_per_s``."""
    megatron_cpu.install()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with one_rank(device):
        parallel.initialize(TrainLayout(1), timeout_s=60, seed=1)
        try:
            expected, on_host = (_updated(size) for size in (None, BUFFER_BYTES))
        finally:
            parallel.shutdown()
    differ = [name for name, value in expected.items() if not torch.equal(value, on_host[name])]
    require(not differ, f"{len(differ)} of {len(expected)} tensors differ: {differ[:3]}")
    return {"equal_tensors": len(expected), "gb_per_s": _gb_per_s(device, sizes)}


def _updated(host_buffer_bytes: int | None) -> dict[str, Tensor]:
    """On the host: what a model and its optimizer hold after updates from drawn gradients."""
    section = ModelSection(path="none", dtype="bfloat16")
    shape = parse_model_shape(CONFIG)
    model = build_model(shape, TrainLayout(1), section, TrainSection(), trainable=True)
    fill_weights(model)
    optimizer = build_optimizer(model, SETTINGS, NUM_UPDATES, host_buffer_bytes)
    is_host = isinstance(optimizer.state, HostState)
    require(is_host == (host_buffer_bytes is not None), "the state is elsewhere than asked for")
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        _draw_gradients(model, update)
        require(optimizer.step().ok, "the norm of drawn gradients is not finite")
    optimizer.wait_params()
    return _held(model, optimizer)


def _draw_gradients(model: TrainModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(model.params):
        gradient = model.params[name].main_grad
        gradient.copy_(torch.randn(gradient.shape, generator=generator))


def _held(model: TrainModel, optimizer: Optimizer) -> dict[str, Tensor]:
    out = {name: p.detach().cpu().clone() for name, p in model.params.items()}
    names = {id(p): name for name, p in model.params.items()}
    with optimizer.state.shown():
        for part in optimizer.inner.chained_optimizers:
            for param in part.model_param_group_index_map:
                for kind, value in part._get_main_param_and_optimizer_states(param).items():
                    out[f"{names[id(param)]} {kind}"] = value.detach().cpu().clone()
    return out


def _gb_per_s(device: torch.device, sizes: Sizes) -> float:
    """Of a state that is larger than its buffers, both ways counted; its elements become 1."""
    rows, itemsize = 3, 4
    most = sizes.storage_bytes // (rows * itemsize)
    buffers = buffer_elements(NUM_BUFFERS_FULL * most, sizes.storage_bytes, rows * itemsize)
    host = host_zeros(rows, NUM_BUFFERS_FULL * most, device)
    chunks = cut([host.shape[1]], buffers)
    on_device = [torch.empty(rows, size, device=device) for size in buffers]

    def add_one(chunk: Chunk, here: Tensor) -> None:
        here.add_(1)

    started = time.perf_counter()
    stream(host, chunks, on_device, add_one, keep=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    if device.type == "cuda":
        unlock(host)
    require(bool((host == 1).all()), "elements of the host were not changed once")
    return 2 * host.nbytes / 1e9 / seconds
