"""What SGLang does on a CPU without our stand-ins: ``python -m tests.helpers.sglang_bare``.

Prints one JSON line: name of the need -> how SGLang fails, or "" if it does not.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace


def seeded_sampling() -> None:
    import torch
    from sglang.srt.layers.sampler import murmur_hash32

    murmur_hash32(torch.tensor([1]), torch.tensor([2]), torch.arange(3))


def experts_of_other_ranks() -> None:
    import torch
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    layer = SimpleNamespace(
        num_experts=2, w13_weight=torch.ones(2, 8, 4), w2_weight=torch.ones(2, 4, 4)
    )
    config = SimpleNamespace(
        apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None
    )
    topk = (torch.ones(1, 2), torch.tensor([[0, -1]]), None)
    moe_forward_native(layer, torch.ones(1, 4), topk, config)


def latent_attention_without_yarn() -> None:
    from sglang.srt.layers.rotary_embedding.factory import get_rope_cpu

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    get_rope_cpu(8, 8, 128, 10000, False, rope, device="cpu")


def sizes_as_on_a_gpu() -> None:
    from sglang.srt.configs.update_config import get_moe_padding_size, update_intermediate_size

    text = SimpleNamespace(intermediate_size=40)
    model = SimpleNamespace(hf_config=text, hf_text_config=text)
    tp_size = 2
    update_intermediate_size(model, "intermediate_size", tp_size * get_moe_padding_size(None))
    if text.intermediate_size != 40:
        raise ValueError(f"intermediate_size 40 became {text.intermediate_size}")


def sleeping_controller() -> None:
    from sglang.srt.managers.data_parallel_controller import DataParallelController

    if "zmq.NOBLOCK" in inspect.getsource(DataParallelController.event_loop):
        raise ValueError("the event loop spins")


def data_parallel_attention() -> None:
    import torch
    from sglang.srt.layers import dp_attention

    dp_attention.memcpy(torch.zeros(2, 2), torch.ones(1, 2), 0, 0, 1, False)


def rows_of_a_sum() -> None:
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    group = SimpleNamespace(world_size=2, rank_in_group=0, pynccl_comm=None)
    GroupCoordinator.reduce_scatterv(group, torch.ones(3, 4), None, [1, 2])


def length_of_padding() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value(None)


def latent_prefill() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    if "torch_native" not in AttentionBackendRegistry._handlers:
        handler = AttentionBackendRegistry.get_handler("torch_native")
        raise ValueError(f"a fresh prefill is handled by {handler.__name__}")


def host_buffers() -> None:
    import torch
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, HostTensorAllocator

    allocate = ALLOC_MEMORY_FUNCS["cpu"]
    allocate((2, 2), torch.int32, "cpu", pin_memory=True, allocator=HostTensorAllocator())


def image_transforms() -> None:
    """SGLang imports them for a text model too."""
    from sglang.srt.multimodal import internvl_utils

    placeholder = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torchvision"}
    for name in placeholder:
        del sys.modules[name]
    try:
        importlib.reload(internvl_utils)
    finally:
        sys.modules.update(placeholder)


def deterministic_attention() -> None:
    from sglang.srt.arg_groups import choices

    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        raise ValueError("torch_native is refused in deterministic mode")


def deterministic_prefix_cache() -> None:
    from sglang.srt.arg_groups import choices

    if "torch_native" not in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND:
        raise ValueError("torch_native shares no prefixes in deterministic mode")


def deterministic_operators() -> None:
    """Last: it leaves torch's own operators replaced."""
    import torch
    from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode

    enable_batch_invariant_mode()
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))


NEEDS: tuple[Callable[[], None], ...] = (
    seeded_sampling,
    experts_of_other_ranks,
    latent_attention_without_yarn,
    sizes_as_on_a_gpu,
    sleeping_controller,
    data_parallel_attention,
    rows_of_a_sum,
    length_of_padding,
    latent_prefill,
    host_buffers,
    image_transforms,
    deterministic_attention,
    deterministic_prefix_cache,
    deterministic_operators,
)


def failure(need: Callable[[], None]) -> str:
    try:
        need()
    except BaseException as error:  # noqa: BLE001  (whatever SGLang does is the answer)
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    import sglang.srt.managers.data_parallel_controller
    import sglang.srt.models.deepseek_v2
    import sglang.srt.server_args  # noqa: F401

    sys.stdout.write(json.dumps({need.__name__: failure(need) for need in NEEDS}) + "\n")


if __name__ == "__main__":
    main()
