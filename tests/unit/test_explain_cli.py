"""``rlhf explain``: what it prints, draws and refuses; its bytes against the independent count."""

from __future__ import annotations

import json
import math
import re
import shlex
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.cli import main
from rlhf.dist.layout_text import parse_rollout, parse_train
from rlhf.explain import add_arguments, read_request, train_bytes_mean
from rlhf.reshard.explain import Explanation
from rlhf.weights.families import full_shapes, rollout_pieces
from rlhf.weights.find_model import find_model, known_models
from tests.helpers.recipes import RECIPES, SLOW
from tests.helpers.reshard_oracle import count_costs, shard_bytes
from tests.helpers.shapes import shapes, train_layouts

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "reshard.md").read_text(encoding="utf-8")
MOONLIGHT = "--model moonlight-16b --ranks 16 --train tp=2,ep=4,etp=1 --rollout tp=8,ep=8,dp=2"
KEYS = {
    "model_bytes",
    "train_shard_bytes_mean",
    "rollout_shard_bytes_mean",
    "moved_bytes_total",
    "lower_bound_bytes",
    "cross_node_bytes_total",
    "cross_node_lower_bound_bytes",
    "full_gather_bytes_per_rank",
    "local_bytes_total",
    "messages",
    "rounds",
    "staging_bytes",
    "send_balance",
    "send_balance_bound",
    "predicted_s",
    "floor_s",
    "plan_build_s_per_rank",
}


def _run(capsys, words: str) -> str:
    assert main(["explain", *shlex.split(words)]) == 0
    return capsys.readouterr().out


def _refused(capsys, words: str) -> str:
    assert main(["explain", *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RECIPES]
)
def test_known_recipes_move_the_least_and_the_least_is_counted_right(capsys, name):
    known = RECIPES[name]
    got = json.loads(
        _run(
            capsys,
            f"--model {known.model} --ranks {known.ranks} --train {known.train} "
            f"--rollout {known.rollout} --json",
        )
    )
    costs = count_costs(
        find_model(known.model),
        parse_train(known.train, known.ranks),
        parse_rollout(known.rollout, known.ranks),
        [rank // 8 for rank in range(known.ranks)],
    )
    for found, table in (
        (costs.model, known.model_gb),
        (costs.train_shard_mean, known.train_shard_gb),
        (costs.rollout_shard_mean, known.engine_shard_gb),
        (costs.full_gather_per_rank, known.full_gather_gb),
        (costs.lower_bound / known.ranks, known.moved_gb),
        (costs.cross_node_lower_bound / known.ranks, known.crossing_gb),
    ):
        assert found / 1e9 == pytest.approx(table, rel=0.01)
    assert got["model_bytes"] == costs.model
    assert got["moved_bytes_total"] == got["lower_bound_bytes"] == costs.lower_bound
    crossing = costs.cross_node_lower_bound
    assert got["cross_node_bytes_total"] == got["cross_node_lower_bound_bytes"] == crossing
    assert got["moved_bytes_per_rank_max"] == max(costs.lower_bound_by_rank)
    assert got["local_bytes_total"] == sum(costs.rollout_shards) - costs.lower_bound
    assert got["train_shard_bytes_mean"] == pytest.approx(costs.train_shard_mean, rel=1e-12)
    assert got["rollout_shard_bytes_mean"] == pytest.approx(costs.rollout_shard_mean, rel=1e-12)
    assert got["send_balance"] <= 1.05 * got["send_balance_bound"]
    assert got["staging_bytes"] <= 2 * 512 * 2**20
    assert got["floor_s"] <= got["predicted_s"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_mean_over_stages_and_tensor_ranks_is_that_of_all_ranks(data):
    shape = data.draw(shapes())
    layout = data.draw(train_layouts(shape))
    costs = count_costs(shape, layout, parse_rollout("", layout.world), [0] * layout.world)
    assert train_bytes_mean(shape, layout, 2) == pytest.approx(costs.train_shard_mean)


def test_layers_for_multi_token_prediction_are_counted_when_asked(capsys):
    """DeepSeek-V3's: a layer of experts and a projection, in bfloat16 but for a bias."""
    words = "--model deepseek-v3-671b --ranks 8 --train ep=8 --rollout tp=8,ep=8 --json"
    without, with_mtp = (json.loads(_run(capsys, words + more)) for more in ("", " --mtp"))
    shape = find_model("deepseek-v3-671b")
    added = {
        name: math.prod(dims)
        for name, dims in full_shapes(shape, mtp=True).items()
        if name.startswith("model.layers.61.")
    }
    bias = added["model.layers.61.mlp.gate.e_score_correction_bias"]
    assert with_mtp["model_bytes"] - without["model_bytes"] == 2 * sum(added.values()) + 2 * bias
    layout, more = parse_rollout("tp=8,ep=8", 8), 0
    for rank in range(8):
        pieces = rollout_pieces(shape, layout, rank, mtp=True)
        more += shard_bytes([p for p in pieces if p.param.startswith("draft.")], 2)
    arrived = [r["moved_bytes_total"] + r["local_bytes_total"] for r in (without, with_mtp)]
    assert arrived[1] - arrived[0] == more
    assert with_mtp["moved_bytes_total"] == with_mtp["lower_bound_bytes"]


def test_the_record_names_each_key_once(capsys):
    text = _run(capsys, f"{MOONLIGHT} --json")
    names = [name for name, _ in json.loads(text, object_pairs_hook=list)]
    assert names == [field.name for field in fields(Explanation)]
    assert set(names) >= KEYS


def test_links_follow_the_nodes(capsys):
    one = json.loads(_run(capsys, f"{MOONLIGHT} --ranks-per-node 16 --json"))
    many = json.loads(_run(capsys, f"{MOONLIGHT} --ranks-per-node 1 --json"))
    assert one["cross_node_bytes_total"] == one["bytes_by_link"]["fabric"] == 0
    assert many["bytes_by_link"]["node"] == 0
    assert one["moved_bytes_total"] == many["cross_node_bytes_total"]
    fast = json.loads(_run(capsys, f"{MOONLIGHT} --ranks-per-node 1 --nic-gbs 90 --json"))
    assert fast["floor_s"] == pytest.approx(many["floor_s"] / 2)


def test_a_smaller_window_means_more_rounds_and_less_staging(capsys):
    large = json.loads(_run(capsys, f"{MOONLIGHT} --json"))
    small = json.loads(_run(capsys, f"{MOONLIGHT} --window-mib 64 --json"))
    assert small["rounds"] > large["rounds"]
    assert small["staging_bytes"] <= 2 * 64 * 2**20 < large["staging_bytes"]
    assert small["moved_bytes_total"] == large["moved_bytes_total"]


def test_a_picture_is_written(capsys, tmp_path):
    path = tmp_path / "moves.png"
    assert "moonlight-16b" in _run(capsys, f"{MOONLIGHT} --picture {path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "must end in one of" in _refused(capsys, f"{MOONLIGHT} --picture a.doc")
    assert "no folder nowhere" in _refused(capsys, f"{MOONLIGHT} --picture nowhere/a.png")


def test_a_configuration_says_all_by_itself(capsys, tmp_path):
    (tmp_path / "config.json").write_text(known_models()["qwen2.5-7b"].read_text())
    words = f"{ROOT / 'configs' / 'demo.yaml'} model.path={tmp_path}"
    assert "2 engines of 1" in _run(capsys, words)
    parser = ArgumentParser()
    add_arguments(parser)
    request = read_request(parser.parse_args(words.split()))
    assert (request.train, request.rollout) == (parse_train("pp=2", 2), parse_rollout("", 2))
    assert (request.window_bytes, request.max_peers, request.itemsize) == (32 << 20, 64, 4)
    assert request.shape == find_model("qwen2.5-7b")
    float32 = json.loads(_run(capsys, f"{words} --json"))
    bfloat16 = json.loads(_run(capsys, f"{words} model.dtype=bfloat16 --json"))
    assert float32["moved_bytes_total"] == 2 * bfloat16["moved_bytes_total"]


def test_a_fault_of_a_configuration_is_named_with_its_place(capsys, tmp_path):
    demo = ROOT / "configs" / "demo.yaml"
    assert f"{demo}:model.path: {tmp_path}" in _refused(capsys, f"{demo} model.path={tmp_path}")
    (tmp_path / "config.json").write_text(known_models()["qwen2.5-7b"].read_text())
    words = f"{demo} model.path={tmp_path} rollout.tp=2 rollout.dp=2"
    assert f"{demo}:rollout.dp: must be 1, is 2" in _refused(capsys, words)
    assert "world=3 must be a multiple" in _refused(capsys, f"{words} --ranks 3")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "rlhf explain CONFIG, or rlhf explain --model NAME"),
        ("--model moonlight-16b", "needs --ranks, --train, --rollout too"),
        ("--model moonlite --ranks 1 --train tp=1 --rollout tp=1", "did you mean moonlight-16b"),
        (f"{MOONLIGHT} --ranks 0", "--ranks: must be at least 1, is 0"),
        (f"{MOONLIGHT} --ranks-per-node 0", "--ranks-per-node: must be at least 1, is 0"),
        (f"{MOONLIGHT} --nic-gbs 0", "--nic-gbs: must be above 0 GB/s and finite, is 0.0"),
        (f"{MOONLIGHT} --nvlink-gbs inf", "--nvlink-gbs: must be above 0 GB/s and finite, is inf"),
        (f"{MOONLIGHT} --picture /proc/x.png", "--picture /proc/x.png: cannot be written"),
        (f"{MOONLIGHT} --train vpp=2", "train.vpp: 2 chunks need train.pp > 1, which is 1; set"),
        (f"{MOONLIGHT} --rollout tp=3", "use 18 ranks or a smaller tp or pp"),
        (f"{MOONLIGHT} --rollout tp=8,dp=3", "dp=3 must divide rollout.tp=8; set it to a divisor"),
        (f"{MOONLIGHT} --train ep=3,etp=1", "etp*ep*pp=3 (etp=1); use 18 ranks or a smaller"),
        (f"{MOONLIGHT} --train tpp=2", "train.tpp: is not a key; did you mean tp?"),
        (f"{MOONLIGHT} --train tp=3 --ranks 48", "train.tp: 3 must divide the model's attention"),
        (f"{MOONLIGHT} --rollout tp=16,dp=4,a2a=deepep", "rollout.ep: must equal rollout.tp=16"),
        (f"{MOONLIGHT} --train pp=2,first=30", "stage needs one layer at least: lower pp"),
        (f"{MOONLIGHT} --mtp", "mtp: must be false: num_nextn_predict_layers of the model is 0"),
        (f"a.yaml {MOONLIGHT}", "a.yaml says model and layouts; leave out --model, --train, --ro"),
        (
            "--model smollm2-135m --ranks 1 --train tp=1 --rollout tp=1,quantization=block_fp8",
            "rollout.quantization: must be none",
        ),
        ("nowhere.yaml", "nowhere.yaml: no such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_each(capsys, words, expected):
    assert expected in _refused(capsys, words)


def test_the_example_of_the_docs_prints_what_it_shows(capsys):
    """All but the seconds that planning takes."""
    command, shown = re.search(
        r"\n    (rlhf explain --model.*?)\n\n(.*?)\n\n[^ \n]", DOC, re.S
    ).groups()
    words = re.sub(r"\\\n", " ", command).removeprefix("rlhf explain")
    printed = _run(capsys, words)
    lines = [line.removeprefix("    ").rstrip() for line in shown.splitlines()]
    varies = re.compile(r"planning .*")
    assert [varies.sub("", line) for line in lines] == [
        varies.sub("", line.rstrip()) for line in printed.rstrip().splitlines()
    ]


def test_the_docs_name_every_key_of_the_record():
    missing = [f.name for f in fields(Explanation) if f"`{f.name}`" not in DOC]
    assert not missing
