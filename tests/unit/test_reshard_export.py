"""Export: transformers reads back what was loaded, bit for bit, whatever the layout."""

from __future__ import annotations

import json
import math
import threading
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from rlhf.dist.layout import TrainLayout
from rlhf.reshard.export import Exporter, assign_files
from rlhf.reshard.transport import LocalHub
from rlhf.weights.families import full_shapes, train_param_shapes, train_pieces
from rlhf.weights.hf_checkpoint import check_index, load_pieces
from rlhf.weights.model_shape import load_model_shape
from tests.helpers.movers import in_threads, no_poll
from tests.helpers.shapes import make_shape
from tests.helpers.shards import dtypes_of
from tests.helpers.tiny_models import make_tiny

EXPERT_LAYOUTS = (
    TrainLayout(1),
    TrainLayout(2, tp=2),
    TrainLayout(2, ep=2),
    TrainLayout(2, pp=2, vpp=2),
    TrainLayout(8, tp=2, pp=2, last=1, ep=2, etp=1),
    TrainLayout(8, tp=2, ep=4, etp=2),
)


class ThreadGather:
    """All-gather of objects between threads."""

    def __init__(self, world):
        self._values = [None] * world
        self._barrier = threading.Barrier(world, timeout=20)

    def of(self, rank):
        def gather(value):
            self._values[rank] = value
            self._barrier.wait()
            out = list(self._values)
            self._barrier.wait()
            return out

        return gather


def _exporters(folder, layout, dtype=torch.float32, max_file_bytes=1 << 20):
    shape = load_model_shape(folder)
    hub, meeting, out = LocalHub(layout.world), ThreadGather(layout.world), []
    for rank in range(layout.world):
        shapes, pieces = (f(shape, layout, rank) for f in (train_param_shapes, train_pieces))
        dtypes = dtypes_of(pieces, dtype)
        params = {n: torch.zeros(s, dtype=dtypes[n]) for n, s in shapes.items()}
        load_pieces(folder, pieces, params)
        out.append(
            Exporter(
                shape=shape,
                layout=layout,
                rank=rank,
                params=params,
                dtype=dtype,
                transport=hub.transport(rank),
                gather=meeting.of(rank),
                max_file_bytes=max_file_bytes,
            )
        )
    return out


def _export(exporters, folder, source):
    in_threads([partial(e.write, folder, source, no_poll) for e in exporters])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Family -> folder of a tiny model; one has an odd vocabulary, one is tied."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny(root / "llama", "llama", vocab_size=509),
        "qwen2": make_tiny(root / "qwen2", "qwen2", tied=True),
        **{f: make_tiny(root / f, f) for f in ("qwen3", "qwen3_moe", "moonlight")},
        "deepseek_v3": make_tiny(root / "deepseek_v3", "deepseek_v3", num_nextn_predict_layers=1),
        "glm4_moe": make_tiny(root / "glm4_moe", "glm4_moe", vocab_size=509),
    }


@pytest.mark.parametrize(
    "family,layout",
    [
        ("llama", TrainLayout(1)),
        ("llama", TrainLayout(4, tp=2, pp=2)),
        ("qwen2", TrainLayout(4, tp=2, pp=2, first=1)),
        ("qwen3", TrainLayout(4, tp=2)),
        ("qwen3", TrainLayout(2, pp=2, vpp=2)),
        *product(("qwen3_moe", "deepseek_v3", "moonlight", "glm4_moe"), EXPERT_LAYOUTS),
    ],
)
def test_load_then_export_is_the_identity(family, layout, models, tmp_path):
    from transformers import AutoModelForCausalLM

    source = models[family]
    exporters = _exporters(source, layout, max_file_bytes=100_000)
    _export(exporters, tmp_path / "hf", source)
    index = check_index(tmp_path / "hf", full_shapes(load_model_shape(source)))
    assert len(set(index.files.values())) > layout.world
    before = load_file(source / "model.safetensors")
    after = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        after.update(load_file(path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    original = AutoModelForCausalLM.from_pretrained(source)
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in original.state_dict().items())


def test_the_folder_is_complete_and_says_its_dtype(models, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = models["qwen3"]
    _export(_exporters(source, TrainLayout(2, pp=2), torch.bfloat16), tmp_path / "hf", source)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype is torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("1+2").input_ids == AutoTokenizer.from_pretrained(source)("1+2").input_ids
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_bfloat16_folder_has_a_float32_expert_bias_and_no_prediction_layers(models, tmp_path):
    source = models["deepseek_v3"]
    _export(_exporters(source, TrainLayout(2, ep=2), torch.bfloat16), tmp_path / "hf", source)
    before = load_file(source / "model.safetensors")
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    after = load_file(path)
    for name, tensor in before.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert after[name].dtype is dtype and torch.equal(after[name], tensor.to(dtype)), name
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert (
        json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    )
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())


def test_an_export_replaces_the_one_before(models, tmp_path):
    source = models["qwen3"]
    exporters = _exporters(source, TrainLayout(2, tp=2))
    _export(exporters, tmp_path / "hf", source)
    (tmp_path / "hf" / "stale").write_text("")
    for exporter in exporters:
        for parameter in exporter._params.values():
            parameter += 1
    _export(exporters, tmp_path / "hf", source)
    before = load_file(source / "model.safetensors")
    name = "model.layers.2.self_attn.k_proj.weight"
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    assert torch.equal(load_file(path)[name], before[name] + 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    assert not (tmp_path / "hf" / "stale").exists()


def test_a_writer_that_fails_fails_all_ranks_and_leaves_nothing(models, tmp_path):
    source = models["qwen3"]
    exporters = _exporters(source, TrainLayout(2, tp=2))
    _export(exporters, tmp_path / "hf", source)
    blocked = tmp_path / ".hf2.partial"
    blocked.write_text("a file where the work folder should be")
    errors = []
    jobs = []
    for exporter in exporters:

        def job(e=exporter):
            try:
                e.write(tmp_path / "hf2", source, no_poll)
            except RuntimeError as error:
                errors.append(str(error))

        jobs.append(job)
    in_threads(jobs)
    assert len(errors) == 2
    assert all("hf2 failed" in e and "rank 0: FileExistsError" in e for e in errors)
    assert not (tmp_path / "hf2").exists()


def test_an_export_without_one_of_the_tensors_is_refused(models, tmp_path):
    source = models["qwen3"]
    exporters = _exporters(source, TrainLayout(2, tp=2), max_file_bytes=100_000)
    forgotten = exporters[0].files[-1].tensors[0]
    for exporter in exporters:
        exporter.files = exporter.files[:-1]
    errors = []

    def job(exporter):
        try:
            exporter.write(tmp_path / "hf", source, no_poll)
        except RuntimeError as error:
            errors.append(str(error))

    in_threads([partial(job, e) for e in exporters])
    assert len(errors) == 2
    assert all("left nothing: rank 0: ValueError" in e for e in errors)
    assert all(f"{forgotten} is missing" in e for e in errors)
    assert not (tmp_path / "hf").exists()


def test_files_are_even_and_every_rank_writes_before_any_writes_twice():
    shape = make_shape(num_hidden_layers=16)
    layout = TrainLayout(4, pp=4)
    shards = [train_pieces(shape, layout, r) for r in range(4)]
    bytes_of = {name: math.prod(dims) * 4 for name, dims in full_shapes(shape).items()}
    total = sum(bytes_of.values())
    files = assign_files(bytes_of, shards, total // 8)
    assert sorted(t for f in files for t in f.tensors) == sorted(bytes_of)
    assert (
        sorted(f.writer for f in files[:4]) == sorted(f.writer for f in files[4:8]) == [0, 1, 2, 3]
    )
    sizes = [sum(bytes_of[t] for t in f.tensors) for f in files]
    assert max(sizes) <= total // len(files) + max(bytes_of.values())


def test_the_writer_is_a_rank_that_holds_the_file():
    """Two files, four ranks: the layers of the second stage are not written by the first."""
    shape = make_shape(num_hidden_layers=16, vocab_size=5)
    layout = TrainLayout(4, pp=2)
    shards = [train_pieces(shape, layout, r) for r in range(4)]
    bytes_of = {name: math.prod(dims) * 4 for name, dims in full_shapes(shape).items()}
    first, second = assign_files(bytes_of, shards, sum(bytes_of.values()) // 2)
    assert first.writer in (0, 1) and second.writer in (2, 3)
