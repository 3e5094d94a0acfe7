"""SGLang on a machine without a GPU: plain torch, no compiled kernels.

SGLang finds this module through two entry points (``setup.py``) in every process that imports it.
``sglang.srt.platforms`` -> :func:`activate` names the platform class; ``sglang.srt.plugins`` ->
:func:`register_hooks` replaces functions. Both do nothing when a CUDA device is present, unless
``SGLANG_PLATFORM=rlhf_cpu`` asks for this platform. For each stand-in
``tests/e2e/test_sglang_needs.py`` shows what SGLang does without it, and fails when SGLang no
longer needs it.

What stands in for what:

* ``rlhf.platform.sglang_cpu_platform.CpuPlatform``: an out-of-tree platform without capabilities,
  so that SGLang takes its torch-native paths (``SGLANG_USE_CPU_ENGINE=1`` would need sgl_kernel).
* a placeholder ``torchvision``: SGLang imports its transforms for image models; the wheels are
  CUDA builds that do not load beside a CPU torch.
* ``murmur_hash32``: hash of the seeded sampler.
* ``moe_forward_native``: routed experts when some live on another rank.
* ``maybe_enable_batch_invariant_mode``: deterministic mode would replace aten by Triton kernels;
  on a CPU with one thread the aten operators repeat bit for bit as they are.
* ``get_rope_cpu``: latent attention without YaRN, which SGLang's own CPU engine refuses.
* ``adjust_config_with_unaligned_cpu_tp``: SGLang pads heads and feed-forward sizes on a CPU for
  its compiled kernels; live weights keep the sizes that they have on a GPU.
* ``GroupCoordinator.reduce_scatterv``: needs NCCL, but in deterministic mode; DP-attention over all
  ranks of an engine with experts calls it.
* ``DataParallelController.event_loop``: spins on a core that schedulers need here.
* what the platform class sets once a model is loaded: plain host buffers, DP-attention, the
  absorbed form of latent attention.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PLATFORM_NAME = "rlhf_cpu"
PLATFORM_CLASS = "rlhf.platform.sglang_cpu_platform.CpuPlatform"
_MASK32 = 0xFFFFFFFF


def activate() -> str | None:
    """The platform's class path, or None on a machine with a CUDA device."""
    import torch

    if torch.cuda.is_available() and os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    stand_in_torchvision()
    return PLATFORM_CLASS


def register_hooks() -> None:
    """Replace what SGLang has as Triton or C++ only; nothing unless our platform is active."""
    from sglang.srt.platforms import current_platform

    if f"{type(current_platform).__module__}.{type(current_platform).__name__}" != PLATFORM_CLASS:
        return
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    for target, stand_in in (
        ("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32),
        ("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", moe_forward_native),
        (
            "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
            _keep_aten_operators,
        ),
        ("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", _rope_of_any_kind),
        (
            "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
            _keep_sizes,
        ),
        (
            "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv",
            _reduce_scatterv,
        ),
        (
            "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
            _wait_for_messages,
        ),
    ):
        HookRegistry.register(target, stand_in, HookType.REPLACE)


def stand_in_torchvision() -> None:
    """Put a placeholder ``torchvision`` into ``sys.modules`` unless the real one is installed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils import import_utils

    # transformers caches its answers: let it find the truth before the placeholder exists.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    import enum

    interpolation = enum.Enum(  # type: ignore[misc]  # members and values of the real one
        "InterpolationMode",
        {
            "NEAREST": "nearest",
            "NEAREST_EXACT": "nearest-exact",
            "BILINEAR": "bilinear",
            "BICUBIC": "bicubic",
            "BOX": "box",
            "HAMMING": "hamming",
            "LANCZOS": "lanczos",
        },
    )
    root = _empty_package("torchvision")
    transforms = _empty_package("torchvision.transforms")
    functional = _empty_package("torchvision.transforms.functional")
    root.__dict__.update(__version__="0.0.0+placeholder", transforms=transforms)
    transforms.__dict__.update(InterpolationMode=interpolation, functional=functional)
    functional.__dict__.update(InterpolationMode=interpolation)


def _empty_package(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    return module


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit) of the four words seed-low, seed-high, position, column.

    Args:
        seed: [n] int64 or uint64, one per request.
        positions: [n] position of the sampled token.
        col_indices: [v] token ids.

    Returns:
        [n, v] int64 in [0, 2**32), equal to what SGLang's Triton kernel computes.
    """
    import torch

    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    h = _mix(torch.zeros_like(seed), seed & _MASK32)
    h = _mix(h, (seed >> 32) & _MASK32)
    h = _mix(h, positions.to(torch.int64) & _MASK32)
    h = _mix(h[:, None], (col_indices.to(torch.int64) & _MASK32)[None, :])
    h = h ^ 16  # length of the key in bytes
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK32


def _mix(h: Tensor, k: Tensor) -> Tensor:
    k = (k * 0xCC9E2D51) & _MASK32
    k = (_rotate_left(k, 15) * 0x1B873593) & _MASK32
    return (_rotate_left(h ^ k, 13) * 5 + 0xE6546B64) & _MASK32


def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, cfg: Any) -> Tensor:
    """Routed SwiGLU experts without biases; ids of -1 (an expert of another rank) add nothing.

    Args:
        layer: SGLang's FusedMoE; ``w13_weight`` [e, 2f, h], ``w2_weight`` [e, h, f].
        x: [t, h].
        topk_output: ``topk_ids`` [t, k] local expert numbers, ``topk_weights`` [t, k].
        cfg: SGLang's MoeRunnerConfig; not used.

    Returns:
        [t, h] in the dtype of ``x``.
    """
    import torch
    from torch.nn import functional

    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    out = torch.zeros_like(x)
    for expert in range(layer.w13_weight.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        gate, up = functional.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
        out.index_add_(0, token, y * weights[token, slot, None].to(y.dtype))
    return out


def _keep_aten_operators(model_runner: Any) -> None:
    """Deterministic mode on a CPU: the aten operators stay."""


def _rope_of_any_kind(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool,
    rope_scaling: dict[str, Any] | None,
    dtype: Any,
    partial_rotary_factor: float,
    device: str | None,
) -> Any:
    """The rotary embedding that a GPU would get; it runs as plain torch."""
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(
        head_size,
        rotary_dim,
        max_position,
        base,
        is_neox_style,
        rope_scaling,
        dtype,
        partial_rotary_factor,
    )


def _keep_sizes(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """No padding: torch's operators take any size."""
    return model_config


def _reduce_scatterv(
    group: Any, input_: Tensor, output: Tensor | None = None, sizes: list[int] | None = None
) -> Tensor:
    """Rows summed over the group, of which each rank keeps its own: as in deterministic mode."""
    return group._deterministic_reduce_scatterv(input_, output, sizes)


def _wait_for_messages(controller: Any) -> None:
    """The process that hands requests to DP-attention groups: SGLang's loop never sleeps."""
    from sglang.srt.managers.io_struct import sock_recv

    while True:
        controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))
