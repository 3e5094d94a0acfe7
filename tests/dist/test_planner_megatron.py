"""The planner's bytes against Megatron itself: buffers and optimizer shards of real models.

One process stands for each rank in turn, in a world that does not exist (``fake_groups``); what is
counted are the storages that its model and its optimizer hold.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlhf.config.schema import (
    ExpertsSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    TrainSection,
)
from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.memory.table import Region
from rlhf.planner.memory import Job, Machine, ledger
from rlhf.planner.train_memory import Head, ModelUse, train_bytes
from rlhf.platform.fake_world import fake_groups
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.tiny_models import make_tiny

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"vocab_size": 515},
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "moonlight": {},
    "glm4_moe": {"vocab_size": 515},
}
WIDE = "wide"  # more elements than a bucket holds
ITEMSIZES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Case:
    family: str
    layout: TrainLayout
    ranks: tuple[int, ...]
    dtype: str = "bfloat16"
    head: Head = "logprobs"
    trainable: bool = True
    freeze_router: bool = False
    on_host: bool = False

    @property
    def train(self) -> TrainSection:
        tp = self.layout.tp
        moe = ExpertsSection(freeze_router=self.freeze_router)
        return TrainSection(tp=tp, sequence_parallel=tp > 1, moe=moe)


DENSE = [
    TrainLayout(1),
    TrainLayout(6, tp=2),
    TrainLayout(6, cp=2),
    TrainLayout(8, tp=2, pp=2, first=1, cp=2),
    TrainLayout(10, pp=2, vpp=2),
    TrainLayout(24, tp=2, pp=4),
]
EXPERTS = [
    *DENSE[:4],
    TrainLayout(4, ep=4),
    TrainLayout(12, tp=2, ep=2, etp=1),
    TrainLayout(16, tp=2, pp=2, ep=2, etp=2),
    TrainLayout(24, tp=2, pp=2, vpp=2, cp=2, ep=2, etp=1),
    TrainLayout(32, tp=2, pp=4, cp=2, ep=4, etp=1, last=1, first=1),
]
ALL = [
    Case(family, layout, (0, layout.world // 2, layout.world - 1), dtype)
    for family in MODELS
    for layout in (DENSE if family in ("llama", "qwen2", "qwen3") else EXPERTS)
    for dtype in ITEMSIZES
]
OTHER = [
    Case("qwen2", TrainLayout(4, pp=2), (0, 3), head="values"),
    Case("deepseek_v3", TrainLayout(4, tp=2, ep=2), (1,), head="values"),
    Case("qwen2", TrainLayout(4, pp=2), (0, 3), trainable=False),
    Case("deepseek_v3", TrainLayout(4, tp=2, ep=2), (1,), trainable=False),
    Case("qwen2", TrainLayout(2, tp=2), (1,), head="values", trainable=False),
    Case("glm4_moe", TrainLayout(4, ep=2), (1,), freeze_router=True),
]
FEW = [
    Case("llama", DENSE[3], (0,)),
    Case("qwen2", DENSE[4], (9,)),
    Case("qwen3", DENSE[5], (0,)),
    Case("qwen2", DENSE[1], (5,), "float32"),
    *(Case("qwen3_moe", layout, (layout.world - 1,)) for layout in EXPERTS[4:7]),
    *(Case("deepseek_v3", layout, (layout.world - 1,)) for layout in (EXPERTS[3], *EXPERTS[7:])),
    Case("moonlight", EXPERTS[5], (3,), "float32"),
    Case("glm4_moe", EXPERTS[6], (5,)),
    Case("glm4_moe", EXPERTS[4], (1,), "float32"),
    *OTHER,
]
BUCKETS = [
    Case(WIDE, layout, (0, layout.world - 1), dtype)
    for layout in (TrainLayout(2), TrainLayout(6, tp=2), TrainLayout(4, pp=2))
    for dtype in ITEMSIZES
]
STREAM_MIB = 1
ON_HOST = [
    Case("qwen2", TrainLayout(1), (0,), on_host=True),
    Case("deepseek_v3", TrainLayout(4, ep=4), (1, 3), on_host=True),
    Case("qwen3", TrainLayout(6, tp=2), (0, 5), "float32", on_host=True),
]
"""The state is larger than two buffers, or smaller than one."""
CASES = list(dict.fromkeys([*FEW, *ALL, *BUCKETS]))

Counts = tuple[int, int, int]


def _label(case: Case) -> str:
    grid = "-".join(
        f"{key}{getattr(case.layout, key)}" for key in ("world", "tp", "pp", "vpp", "cp", "ep")
    )
    how = f"{case.dtype}-{case.head}{'' if case.trainable else '-frozen'}"
    return f"{case.family}-{grid}-{how}{'-router' if case.freeze_router else ''}"


def _measured(pipe: Any, folders: dict[str, str]) -> None:
    """Child: counts of each rank of a case, or the error that building it gave."""
    from rlhf.platform.megatron_cpu import install

    install()
    while (case := pipe.recv()) is not None:
        try:
            pipe.send([_count(folders[case.family], case, rank) for rank in case.ranks])
        except Exception as error:  # noqa: BLE001  the test of this case raises it
            pipe.send(error)


def _count(folder: str, case: Case, rank: int) -> Counts:
    import torch.distributed as dist

    from rlhf.mcore import parallel
    from rlhf.mcore.model import build_model
    from rlhf.mcore.optimizer import build_optimizer

    try:
        with fake_groups(rank, case.layout.world):
            parallel.initialize(case.layout, timeout_s=60, seed=1)
        model = build_model(
            load_model_shape(folder),
            case.layout,
            ModelSection(path=folder, dtype=case.dtype),
            case.train,
            trainable=case.trainable,
            head=case.head,
        )
        weights = _storages(model.params.values())
        if not case.trainable:
            return sum(weights.values()), 0, 0
        gradients = _storages(
            buffer.grad_data
            for chunk in model.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        if case.on_host:
            return _count_on_host(case, model, sum(weights.values()))
        optimizer = build_optimizer(model, OptimizerSection(lr=1e-3), total_updates=1)
        state = _storages(_state(optimizer.inner))
        masters = {key: size for key, size in state.items() if key not in weights}
        return sum(weights.values()), sum(gradients.values()), sum(masters.values())
    finally:
        parallel.shutdown()
        dist.destroy_process_group()


def _count_on_host(case: Case, model: Any, weights: int) -> Counts:
    """Weights, the device's part of the optimizer state, and the host's."""
    from rlhf.mcore.optimizer import build_optimizer

    optimizer = build_optimizer(model, OptimizerSection(lr=1e-3), 1, STREAM_MIB * 2**20)
    params = {p.untyped_storage().data_ptr() for p in model.params.values()}
    kept = [
        param
        for part in optimizer.inner.chained_optimizers
        for group in part.optimizer.param_groups
        for param in group["params"]
        if param.untyped_storage().data_ptr() not in params
    ]
    assert sum(_storages(kept).values()) == 0
    buffers = sum(_storages(optimizer.state.buffers()).values())
    return weights, buffers, sum(_storages([optimizer.state.rows]).values())


def _state(optimizer: Any) -> Iterable[torch.Tensor]:
    """What Adam updates, and its moments."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield param
                moments = part.optimizer.state[param]
                yield from (moments["exp_avg"], moments["exp_avg_sq"])


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of each storage, which several tensors may share."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {
        family: str(make_tiny(root / family, family, **settings))
        for family, settings in MODELS.items()
    }
    wide = {"hidden_size": 320, "intermediate_size": 30000, "vocab_size": 70000}
    wide |= {"tie_word_embeddings": False, "max_position_embeddings": 64}
    return made | {WIDE: str(make_tiny(root / WIDE, "llama", **wide))}


@pytest.fixture(scope="module")
def megatron(folders):
    """Ask a process for the counts of a case."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(theirs, folders))
    process.start()
    theirs.close()

    def ask(case: Case) -> list[Counts]:
        mine.send(case)
        answer = mine.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c not in FEW), id=_label(c)) for c in CASES],
)
def test_the_planner_counts_what_megatron_allocates(folders, megatron, case):
    use = ModelUse(
        load_model_shape(folders[case.family]),
        ITEMSIZES[case.dtype],
        case.head,
        case.trainable,
        case.train.overlap,
        case.freeze_router,
    )
    planned = train_bytes(use, case.layout)
    wanted = [
        (planned.weights[rank], planned.gradients[rank], planned.optimizer[rank])
        for rank in case.ranks
    ]
    assert megatron(case) == wanted


@pytest.mark.parametrize("case", [pytest.param(c, id=_label(c)) for c in ON_HOST])
def test_a_state_on_the_host_takes_the_host_and_two_buffers_of_the_device(folders, megatron, case):
    shape = load_model_shape(folders[case.family])
    job = Job(
        shape=shape,
        train_layout=case.layout,
        rollout_layout=RolloutLayout(case.layout.world),
        model=ModelSection(path=folders[case.family], dtype=case.dtype),
        train=case.train,
        rollout=RolloutSection(kv_tokens=64),
        memory=MemorySection(optimizer="host", stream_mib=STREAM_MIB),
        window_bytes=2**20,
        longest_tokens=16,
    )
    found = ledger(job, Machine(2**40, 2**40, gpus_per_node=1, other_bytes=0))
    device, weights = found.regions[Region.OPTIMIZER], found.regions[Region.ACTOR]
    assert megatron(case) == [(weights[r], device[r], found.host[r]) for r in case.ranks]
