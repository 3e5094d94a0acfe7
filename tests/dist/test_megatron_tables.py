"""The training tables against Megatron itself: what a rank's model has, by name, shape and dtype.

One process stands for each rank in turn, in a world that does not exist.
"""

from __future__ import annotations

import pytest
import torch

from rlhf.dist.layout import TrainLayout
from rlhf.weights.families import train_param_shapes, train_pieces
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.megatron_rank import as_rank, frozen_model, in_megatron
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


def _table(job: tuple[str, TrainLayout, int]) -> Table:
    folder, layout, rank = job
    with as_rank(layout, rank):
        params = frozen_model(folder, layout).params
        return {name: (tuple(p.shape), p.dtype) for name, p in params.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        family: str(make_tiny(root / family, family, **settings))
        for family, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def tables(folders):
    jobs = [(folders[family], layout, rank) for family, layout, rank in RANKS.values()]
    return dict(zip(RANKS, in_megatron(_table, jobs), strict=True))


@pytest.mark.parametrize("key", RANKS)
def test_tables_equal_megatrons_parameters(folders, tables, key):
    family, layout, rank = RANKS[key]
    if isinstance(tables[key], Exception):
        raise tables[key]
    shape = load_model_shape(folders[family])
    dtypes = dtypes_of(train_pieces(shape, layout, rank), torch.bfloat16)
    wanted = {
        name: (size, dtypes[name]) for name, size in train_param_shapes(shape, layout, rank).items()
    }
    assert tables[key] == wanted
