"""The training tables against Megatron itself: what a rank's model has, by name, shape and dtype.

One process stands for each rank in turn, in a world that does not exist: the groups are of torch's
fake backend, and building a model asks no peer for anything.
"""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import pytest
import torch

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.weights.families import train_param_shapes, train_pieces
from rlhf.weights.model_shape import load_model_shape
from rlhf.platform.fake_world import fake_groups
from tests.helpers.shards import dtypes_of
from tests.helpers.tiny_models import make_tiny

MODELS = {
    "llama": {},
    "qwen2": {"vocab_size": 515},
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek_v3": {"first_k_dense_replace": 2},
    "moonlight": {},
    "glm4_moe": {"vocab_size": 515},
}
DENSE = [
    (TrainLayout(1), [0]),
    (TrainLayout(2, tp=2), [1]),
    (TrainLayout(4, tp=2, pp=2, first=1), [0, 3]),
    (TrainLayout(2, pp=2, vpp=2), [1]),
]
EXPERTS = [
    *DENSE,
    (TrainLayout(2, ep=2), [1]),
    (TrainLayout(4, tp=2, ep=4, etp=1), [3]),
    (TrainLayout(8, tp=2, pp=2, ep=2, etp=2), [6]),
    (TrainLayout(8, tp=2, pp=2, vpp=2, ep=2, etp=1), [1]),
]
RANKS = {
    f"{family} {_name} rank {rank}": (family, layout, rank)
    for family in MODELS
    for layout, ranks in (DENSE if family in ("llama", "qwen2", "qwen3") else EXPERTS)
    for rank in ranks
    for _name in ["-".join(f"{k}{getattr(layout, k)}" for k in ("world", "tp", "pp", "vpp", "ep"))]
}

Table = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _tables(pipe: Any, folders: dict[str, str]) -> None:
    """Child: the table of each rank, or the error that building it gave."""
    from rlhf.platform.megatron_cpu import install

    install()
    for family, layout, rank in RANKS.values():
        try:
            pipe.send(_table(folders[family], layout, rank))
        except Exception as error:  # noqa: BLE001  the test of this rank raises it
            pipe.send(error)


def _table(folder: str, layout: TrainLayout, rank: int) -> Table:
    import torch.distributed as dist

    from rlhf.mcore import parallel
    from rlhf.mcore.model import build_model

    try:
        with fake_groups(rank, layout.world):
            parallel.initialize(layout, timeout_s=60, seed=1)
        train = TrainSection(tp=layout.tp, sequence_parallel=layout.tp > 1)
        model = build_model(
            load_model_shape(folder),
            layout,
            ModelSection(path=folder, dtype="bfloat16"),
            train,
            trainable=False,
        )
        return {name: (tuple(p.shape), p.dtype) for name, p in model.params.items()}
    finally:
        parallel.shutdown()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        family: str(make_tiny(root / family, family, **settings))
        for family, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def tables(folders):
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tables, args=(theirs, folders))
    process.start()
    theirs.close()
    try:
        return {key: mine.recv() for key in RANKS}
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("key", RANKS)
def test_tables_equal_megatrons_parameters(folders, tables, key):
    family, layout, rank = RANKS[key]
    if isinstance(tables[key], Exception):
        raise tables[key]
    shape = load_model_shape(folders[family])
    dtypes = dtypes_of(train_pieces(shape, layout, rank), torch.bfloat16)
    wanted = {
        name: (size, dtypes[name])
        for name, size in train_param_shapes(shape, layout, rank).items()
    }
    assert tables[key] == wanted
