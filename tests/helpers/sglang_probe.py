"""SGLang's own model class and ``load_weights`` for one rank of a world that does not exist.

Coordinate-coded tensors go in as a checkpoint's would; what lies in the live parameters afterwards
is the engine's true layout. One probe per process: SGLang's parallel state is global. So
:func:`probe_many` imports SGLang once in a child and forks a grandchild per rank.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import traceback
from dataclasses import dataclass
from typing import Any

from rlhf.dist.layout import RolloutLayout


@dataclass(frozen=True)
class Probe:
    """One rank of one engine layout of the model in ``folder``."""

    folder: str
    layout: RolloutLayout
    rank: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Live:
    """A parameter as SGLang loaded it; elements that nothing wrote are -1."""

    values: Any  # float32 array
    dtype: str


def probe_many(probes: list[Probe], timeout_s: float = 300) -> list[dict[str, Live]]:
    """Live parameters by name, per probe."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_probe_all, args=(theirs, probes))
    process.start()
    theirs.close()
    out = []
    try:
        for probe in probes:
            if not mine.poll(timeout_s):
                raise TimeoutError(f"{probe} took more than {timeout_s} s")
            kind, value = mine.recv()
            if kind == "error":
                raise RuntimeError(f"{probe}:\n{value}")
            out.append(value)
    finally:
        process.kill()
        process.join(10)
    return out


def _probe_all(pipe: Any, probes: list[Probe]) -> None:
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    import torch

    torch.set_num_threads(1)
    import sglang.srt.models.registry  # all model classes: else each grandchild imports them
    import sglang.srt.server_args  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    fork = mp.get_context("fork")
    for probe in probes:
        mine, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_probe_one, args=(theirs, probe))
        child.start()
        theirs.close()
        pipe.send(mine.recv())
        child.join()


def _probe_one(pipe: Any, probe: Probe) -> None:
    try:
        pipe.send(("ok", _live_parameters(probe)))
    except BaseException:  # noqa: BLE001  the test raises it
        pipe.send(("error", traceback.format_exc()))


def _live_parameters(probe: Probe) -> dict[str, Live]:
    import torch

    from rlhf.weights.families import full_shapes
    from rlhf.weights.model_shape import load_model_shape
    from tests.helpers.shards import coded_tensors, fp8_checkpoint

    model = _build(probe)
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    shape = load_model_shape(probe.folder)
    full = coded_tensors(full_shapes(shape), torch.float32)
    if probe.layout.quantization == "block_fp8":
        full = fp8_checkpoint(shape)
    model.load_weights(iter(full.items()))
    return {
        name: Live(p.detach().float().numpy(), str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters()
    }


def _build(probe: Probe) -> Any:
    """SGLang's model on the CPU, under a fake process group."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    layout = probe.layout
    if layout.a2a == "deepep":  # whose package is not here; this does the same to parameters
        os.environ["SGLANG_SHARED_EXPERT_TP1"] = "1"
    args = ServerArgs(
        model_path=probe.folder,
        device="cpu",
        dtype=probe.dtype,
        tp_size=layout.tp,
        ep_size=layout.ep,
        pp_size=layout.pp,
        dp_size=layout.dp,
        enable_dp_attention=layout.dp > 1,
        enable_dp_lm_head=layout.dp > 1,
        moe_dense_tp_size=1 if layout.dp > 1 else None,
        disable_shared_experts_fusion=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.2,
        log_level="error",
        json_model_override_args=json.dumps(_overrides(layout)),
    )
    _fake_world(args, probe)
    config = ModelConfig.from_server_args(args)
    init_layer_runtime(model_config=config)
    load = LoadConfig()
    with set_default_torch_dtype(getattr(torch, probe.dtype)), torch.device("cpu"):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def _overrides(layout: RolloutLayout) -> dict[str, Any]:
    """Of the model's config.json."""
    if layout.quantization == "none":
        return {}
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return {"quantization_config": {**scheme, "weight_block_size": [128, 128]}}


def _fake_world(args: Any, probe: Probe) -> None:
    """SGLang's groups over torch's fake backend: sizes and ranks without peers."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    from tests.helpers.fake_world import fake_groups

    at = probe.layout.coord(probe.rank)
    rank = spawn_world_rank(args, tp_rank=at.tp, pp_rank=at.pp)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    world = probe.layout.engine_size
    with fake_groups(rank, world):
        parallel_state.init_distributed_environment(
            backend="fake", world_size=world, rank=rank, local_rank=0
        )
        parallel_state.initialize_model_parallel(backend="fake")
    initialize_dp_attention(args)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
