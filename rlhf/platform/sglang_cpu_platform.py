"""The SGLang platform class that :mod:`rlhf.platform.sglang_cpu` activates.

Imported by SGLang itself, in processes without a CUDA device only.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain torch on a CPU: no Triton, no graphs, no compiled SGLang kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Nothing to add: the engine host states every argument."""

    def post_load_model(self, model: Any) -> None:
        """Choices that a CPU needs and that SGLang keeps in registries."""
        _plain_host_buffers()
        _data_parallel_attention()
        if hasattr(getattr(model, "config", None), "kv_lora_rank"):
            _absorbed_latent_attention()


def _plain_host_buffers() -> None:
    """Host buffers (routed-expert capture) without cudaHostRegister."""
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def allocate(dims: Any, dtype: Any, *_: Any, **__: Any) -> Any:
        return torch.empty(dims, dtype=dtype, device="cpu")

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _data_parallel_attention() -> None:
    """DP-attention without pinned memory, Triton and CUDA's collectives.

    Modules of SGLang hold a flag of its own CPU engine, which takes torch's operations; gloo wants
    shapes that agree; the backend lacks the length of a padding sequence.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True
    parallel_state._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    GroupCoordinator.all_gather_into_tensor = _gather_flat
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def _gather_flat(group: Any, output: Any, values: Any) -> None:
    group._all_gather_into_tensor(output.view(-1), values.reshape(-1))


def _absorbed_latent_attention() -> None:
    """Multi-head latent attention: always the absorbed form, which reads the latent cache.

    SGLang's default takes plain attention for a fresh prefill, and torch_native cannot read that
    back from a latent KV pool.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda attn, batch: AttnForwardMethod.MLA)
