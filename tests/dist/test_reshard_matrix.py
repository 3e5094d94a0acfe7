"""Weights of real Megatron shards, moved, are what SGLang's own model classes load: bit for bit.

For each pair of layouts one process builds Megatron's model of every rank, fills it from a
checkpoint and moves the weights into tensors of the engines' shapes; forks that stand for the
engines' ranks load the same checkpoint with SGLang's class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from rlhf.rollout.forks import Probe, in_forks
from rlhf.weights.families.blocks import EMBEDDING, HEAD
from tests.dist.matrix_case import RAW, moved, pairs_of, write_model
from tests.helpers.megatron_rank import in_megatron
from tests.helpers.sglang_probe import Live, loaded_parameters

PAIRS = {pair.name: pair for model in RAW for pair in pairs_of(model)}
Parameters = Mapping[str, Live]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    for model in RAW:
        write_model(root / model, model)
    return {model: str(root / model) for model in RAW}


@pytest.fixture(scope="module")
def problems(request, folders) -> dict[str, list[str] | Exception]:
    """Of the pairs whose tests run: what differs between what came and what SGLang loads."""
    asked = [item.callspec.params["name"] for item in request.session.items if _is_of_pair(item)]
    pairs = [PAIRS[name] for name in asked]
    came = in_megatron(moved, [(folders[pair.model], pair) for pair in pairs])
    probes = [
        Probe(folders[pair.model], pair.rollout, rank)
        for pair in pairs
        for rank in range(pair.rollout.engine_size)
    ]
    loaded = in_forks(loaded_parameters, probes)
    out = {}
    for pair, shards in zip(pairs, came, strict=True):
        engine = [next(loaded) for _ in range(pair.rollout.engine_size)]
        try:
            if isinstance(shards, Exception):
                raise shards
            values = [outcome.get() for outcome in engine]
            out[pair.name] = list(_differences(shards, values))
        except RuntimeError as error:
            out[pair.name] = error
    return out


def _is_of_pair(item: pytest.Item) -> bool:
    return getattr(item, "function", None) is test_moved_weights_are_those_that_sglang_loads


def _differences(shards: list[Parameters], engine: list[Parameters]) -> Iterator[str]:
    """Between what came to each rank and what SGLang loads on it."""
    for rank, came in enumerate(shards):
        wanted = engine[rank % len(engine)]
        if came.keys() != wanted.keys():
            yield f"rank {rank}: {sorted(came.keys() ^ wanted.keys())} on one side only"
        for name in came.keys() & wanted.keys():
            for fault in _faults(name, came[name], wanted[name]):
                yield f"rank {rank}, {name}: {fault}"


def _faults(name: str, came: Live, wanted: Live) -> Iterator[str]:
    """Vocabulary padding may stay NaN, which nothing wrote; in SGLang it is that or zero."""
    if (came.dtype, came.values.shape) != (wanted.dtype, wanted.values.shape):
        yield f"{came.dtype} {came.values.shape} came, not {wanted.dtype} {wanted.values.shape}"
        return
    empty = np.isnan(came.values)
    if empty.any() and name not in (EMBEDDING, HEAD):
        yield f"{empty.sum()} elements never came"
    if np.nan_to_num(wanted.values[empty]).any():
        yield "SGLang has weights where nothing came"
    same = came.values.view(np.int32) == wanted.values.view(np.int32)
    if not (same | empty).all():
        yield f"{(~(same | empty)).sum()} of {same.size} elements differ"


@pytest.mark.parametrize("name", PAIRS)
def test_moved_weights_are_those_that_sglang_loads(problems, name):
    found = problems[name]
    if isinstance(found, Exception):
        raise found
    assert found == []


@pytest.mark.parametrize("model", RAW)
def test_every_family_has_a_dozen_pairs_of_every_kind(model):
    pairs = pairs_of(model)
    assert len(pairs) >= 12
    assert {pair.train.world for pair in pairs} >= {1, 2, 4, 6, 8}
    wanted = {"TP", "PP", "uneven stages", "VPP", "CP", "engine TP", "engine PP", "engines"}
    if "moe_intermediate_size" in RAW[model]:
        wanted |= {"EP", "ETP 1", "ETP above 1", "engine EP", "TP of experts"}
        wanted |= {"DP-attention", "whole shared experts"}
    if RAW[model]["num_key_value_heads"] == 4:
        wanted.add("copied KV heads")
    if model in ("qwen3_moe", "deepseek_v3", "moonlight"):
        wanted.add("redundant experts")
    assert wanted <= set().union(*(pair.features() for pair in pairs))
