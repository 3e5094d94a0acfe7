"""``torch.cuda`` calls and ``device="cuda"`` literals, answered by the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

_FACTORIES = (
    *("zeros", "ones", "empty", "full", "rand", "randn"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("tensor", "as_tensor", "arange", "linspace", "eye", "randint"),
)


class NullStream:
    """``torch.cuda.Stream`` of a device whose work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return NullEvent() if event is None else event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class NullEvent:
    """``torch.cuda.Event``: a time stamp."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: NullEvent) -> float:
        """Milliseconds, as CUDA's."""
        return (other._time_s - self._time_s) * 1e3


def _current_device() -> torch.device:
    return CPU  # megatron uses it only as device=... and .to(...)


def is_installed() -> bool:
    """Whether :func:`replace_cuda_calls` ran in this process."""
    return torch.cuda.current_device is _current_device


def replace_cuda_calls() -> None:
    """``torch.cuda`` functions that raise on a build without CUDA."""
    stream = NullStream()
    cuda: Any = torch.cuda
    cuda.current_device = _current_device
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.Stream, cuda.Event = NullStream, NullEvent
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = lambda message: 0
    cuda.nvtx.range_pop = lambda: 0
    cuda.get_device_name = lambda device=None: "cpu"
    cuda.empty_cache = _return_freed_memory
    # megatron asserts it under sequence parallelism; it orders kernels of a GPU
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _without_cuda(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def inner(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return inner


def replace_literal_cuda() -> None:
    """Factory functions, ``.to``, ``.cuda`` and ``pin_memory``: "cuda" means the CPU."""
    from torch.utils._device import _device_constructors

    # A cached set of the factory functions, built on first use. Built after the wrapping below,
    # ``with torch.device("meta")`` and ``torch.set_default_device`` would silently do nothing.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    tensor: Any = torch.Tensor
    tensor.to = to
    tensor.cuda = tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args, **kwargs: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self


def quiet_warnings() -> None:
    """Megatron and torch warn, on every rank, of what is stood in for and of old names."""
    for message in (
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "full scope is deprecated",  # megatron's own default
        r"The \.grad attribute of a Tensor that is not a leaf",  # checked by its optimizer
        r"`torch\.distributed\.\w+` is deprecated",
        "TypedStorage is deprecated",
        "`load_state_dict` is deprecated",  # megatron loads a checkpoint with it
        "Please use DTensor instead and we are deprecating ShardedTensor",  # and keeps it in these
    ):
        warnings.filterwarnings("ignore", message=message)


def keep_freed_memory() -> None:
    """Let the allocator of this process keep what is freed, as a GPU's caching allocator does.

    By default glibc maps every large tensor anew and the kernel zeroes its pages: about a sixth of
    a training step. Does nothing where the C library has no such setting.
    """
    trim_threshold, mmap_threshold = -1, -3  # names of mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)


def _return_freed_memory() -> None:
    """Give to the system what :func:`keep_freed_memory` kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def disable_compilation() -> None:
    """Megatron decorates small functions with torch.compile; on a CPU each costs a C++ build."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.disable = True
