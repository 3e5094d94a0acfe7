"""A job made small: whatever the job admits, its rehearsal admits, and nothing new comes in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf.config.check import rollout_layout, stage_faults, train_layout
from rlhf.config.load import load_config
from rlhf.dist.layout import LayoutError, RolloutLayout, TrainLayout
from rlhf.planner.shrink_layout import Layouts, ranks_for_all, shrink_layouts
from rlhf.planner.shrink_model import shrink_layers, shrink_model
from rlhf.weights.families import rollout_faults, train_faults
from rlhf.weights.model_shape import parse_model_shape
from tests.helpers.shapes import MODELS, make_raw, rollout_layouts, train_layouts

ROOT = Path(__file__).parents[2]
RECIPES = [ROOT / "configs/grpo_600b.yaml", *sorted((ROOT / "configs/recipes").glob("*.yaml"))]


@st.composite
def jobs(draw: st.DrawFn):
    """(config.json object, shape, layouts, ranks of the rehearsal); passes at full size."""
    family = draw(st.sampled_from(sorted(MODELS)))
    values = {"num_key_value_heads": draw(st.sampled_from([1, 2, 4, 8]))}
    raw = make_raw(family, num_hidden_layers=draw(st.integers(2, 12)), **values)
    if "first_k_dense_replace" in raw:
        raw["first_k_dense_replace"] = draw(st.integers(0, raw["num_hidden_layers"]))
    shape = parse_model_shape(raw)
    world = draw(st.sampled_from([2, 4, 6, 8, 12, 16]))
    ranks = draw(st.sampled_from([n for n in range(2, world + 1) if world % n == 0]))
    train = draw(train_layouts(shape, world))
    rollout = draw(rollout_layouts(shape, world))
    try:
        assume(not list(stage_faults(train, shape.num_layers)))
    except LayoutError:
        assume(False)
    plain = rollout.redundant_experts == 0 and (train.vpp == 1 or train.pp > 1)
    assume(plain and (train.pp > 1 or (train.first is None and train.last is None)))
    return raw, shape, Layouts(train, rollout), ranks


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_whatever_a_job_admits_its_rehearsal_admits(job):
    raw, shape, full, ranks = job
    try:
        smaller = shrink_layouts(full, ranks)
    except ValueError as error:
        assert "give one of" in str(error)
        return
    layers = shrink_layers(shape, full.train, smaller)
    small = parse_model_shape(shrink_model(raw, shape, layers, full, smaller))
    t = smaller.train
    train = TrainLayout(ranks, t.tp, t.pp, layers.vpp, t.cp, t.ep, t.etp, layers.first, layers.last)
    assert list(train_faults(small, train)) == []
    assert list(stage_faults(train, small.num_layers)) == []
    assert list(rollout_faults(small, smaller.rollout)) == []
    for axis in full.axes(smaller):
        assert axis.configured > 1 or axis.name in ("expert dp", "train.etp"), axis
    if ranks == full.train.world:
        assert all(axis.configured == axis.rehearsed for axis in full.axes(smaller))
    if t.pp > 1:
        assert (train.vpp > 1, train.first is None, train.last is None) == (
            full.train.vpp > 1,
            full.train.first is None,
            full.train.last is None,
        )
    if shape.moe is not None and t.pp > 1:
        assert kinds_of_first_stage(small, train) == kinds_of_first_stage(shape, full.train)


def kinds_of_first_stage(shape, layout):
    numbers = [n for v in range(layout.vpp) for n in layout.layers(shape.num_layers, 0, v)]
    return {shape.has_experts(n) for n in numbers}


def _layouts(path: Path) -> Layouts:
    config = load_config(path)
    world = config.dist.ranks
    return Layouts(train_layout(config.train, world), rollout_layout(config.rollout, world))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_enough_ranks_keep_every_axis_and_fewer_never_bring_in_one(path):
    full = _layouts(path)
    enough = ranks_for_all(full)
    assert enough <= 16
    if enough > 1:
        assert all(axis.kept for axis in full.axes(shrink_layouts(full, enough)))
    for ranks in (2, 4, 8):
        if ranks <= full.train.world:
            assert all(axis.configured > 1 for axis in full.axes(shrink_layouts(full, ranks)))


def test_pipeline_goes_before_tensor_expert_context_and_data_parallelism():
    train = TrainLayout(64, tp=4, pp=4, cp=2, ep=4, etp=1)
    full = Layouts(train, RolloutLayout(64, tp=16, dp=4, ep=16))
    by_ranks = {}
    for ranks in (2, 4, 8, 16):
        axes = full.axes(shrink_layouts(full, ranks))
        by_ranks[ranks] = [a.name for a in axes if a.name.startswith("train") and a.rehearsed > 1]
    assert by_ranks == {
        2: ["train.pp"],
        4: ["train.pp", "train.tp", "train.ep"],
        8: ["train.pp", "train.tp", "train.ep", "train.cp"],
        16: ["train.pp", "train.tp", "train.ep", "train.cp", "train.dp"],
    }


@pytest.mark.parametrize(
    ("layout", "layers", "counts"),
    [
        ({"pp": 4, "last": 13}, 61, [2, 1]),
        ({"pp": 4, "first": 4}, 25, [1, 2]),
        ({"pp": 4, "first": 3, "last": 2}, 13, [2, 1]),
        ({"pp": 4}, 8, [1, 1]),
        ({"pp": 4, "vpp": 2}, 16, [2, 2]),
        ({"pp": 4, "vpp": 3, "last": 3}, 30, [4, 2]),
    ],
)
def test_uneven_stages_stay_uneven_and_chunks_stay_several(layout, layers, counts):
    shape = parse_model_shape(make_raw("llama", num_hidden_layers=layers))
    full = Layouts(TrainLayout(4, **layout), RolloutLayout(4, tp=2))
    smaller = shrink_layouts(full, 2)
    got = shrink_layers(shape, full.train, smaller)
    train = TrainLayout(2, pp=2, vpp=got.vpp, first=got.first, last=got.last)
    assert list(stage_faults(train, got.total)) == []
    assert [
        sum(len(train.layers(got.total, s, v)) for v in range(got.vpp)) for s in (0, 1)
    ] == counts
