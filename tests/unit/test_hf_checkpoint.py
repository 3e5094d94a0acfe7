"""Safetensors folders: the index, slices into shards, faults named."""

from __future__ import annotations

import json
import os
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.dist.layout import TrainLayout
from rlhf.weights.families import full_shapes, train_param_shapes, train_pieces
from rlhf.weights.hf_checkpoint import (
    check_index,
    is_weight_file,
    load_pieces,
    missing_files,
    read_index,
    write_index,
    write_tensors,
)
from rlhf.weights.piece import Piece
from tests.helpers.shapes import make_shape
from tests.helpers.shards import coded_tensors, cut

SHAPE = make_shape("qwen2", tie_word_embeddings=True)


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in two files with an index; (folder, full tensors)."""
    full = coded_tensors(full_shapes(SHAPE), torch.float32)
    names = list(full)
    files = {n: f"model-{1 + (i > len(names) // 2)}.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        write_tensors(tmp_path / file, {n: full[n] for n in names if files[n] == file})
    write_index(tmp_path, files, sum(t.nbytes for t in full.values()))
    return tmp_path, full


@pytest.fixture
def single(tmp_path):
    full = coded_tensors(full_shapes(SHAPE), torch.float32)
    write_tensors(tmp_path / "model.safetensors", full)
    return tmp_path, full


def _load(folder, layout, rank, dtype=torch.float32):
    shapes = train_param_shapes(SHAPE, layout, rank)
    params = {n: torch.full(s, float("nan"), dtype=dtype) for n, s in shapes.items()}
    load_pieces(folder, train_pieces(SHAPE, layout, rank), params)
    return params


@pytest.mark.parametrize("kind", ["sharded", "single"])
@pytest.mark.parametrize(
    "layout",
    [TrainLayout(1), TrainLayout(4, tp=4), TrainLayout(4, tp=2, pp=2), TrainLayout(2, pp=2, vpp=2)],
)
def test_every_rank_holds_its_slices_and_zero_padding(kind, layout, request):
    folder, full = request.getfixturevalue(kind)
    for rank in range(layout.world):
        params = _load(folder, layout, rank)
        shapes = train_param_shapes(SHAPE, layout, rank)
        wanted = cut(full, train_pieces(SHAPE, layout, rank), shapes)
        for name, tensor in params.items():
            assert torch.equal(tensor, wanted[name].clamp(min=0)), (rank, name)


def test_values_are_cast_to_the_parameter(single):
    folder, full = single
    params = _load(folder, TrainLayout(1), 0, torch.bfloat16)
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    assert torch.equal(params[name], full["model.layers.3.mlp.down_proj.weight"].bfloat16())


def test_parameters_are_filled_in_place_and_keep_their_gradient_flag(single):
    folder, _ = single
    shapes = train_param_shapes(SHAPE, TrainLayout(1), 0)
    params = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in shapes.items()}
    pointers = {n: p.data_ptr() for n, p in params.items()}
    load_pieces(folder, train_pieces(SHAPE, TrainLayout(1), 0), params)
    assert all(p.requires_grad and p.data_ptr() == pointers[n] for n, p in params.items())
    assert all(p.abs().sum() > 0 for p in params.values())


def test_only_the_needed_files_are_opened(sharded):
    """A rank of the first stage works while the file of the last stage is unreadable."""
    folder, _ = sharded
    last = folder / "model-2.safetensors"
    last.write_bytes(b"not a safetensors file")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    layout = TrainLayout(4, pp=4)
    assert {index[p.tensor] for p in train_pieces(SHAPE, layout, 0)} == {"model-1.safetensors"}
    _load(folder, layout, 0)


def test_nothing_of_absent_experts_is_read(tmp_path):
    """A rank with the first half of the experts works while the other half is unreadable."""
    shape = make_shape("deepseek_v3")
    full = coded_tensors(full_shapes(shape), torch.float32)
    late = [n for n in full if ".experts." in n and int(n.split(".")[5]) >= 6]
    write_tensors(tmp_path / "early.safetensors", {n: full[n] for n in full if n not in late})
    (tmp_path / "late.safetensors").write_bytes(b"not a safetensors file")
    files = dict.fromkeys(full, "early.safetensors") | dict.fromkeys(late, "late.safetensors")
    write_index(tmp_path, files, 0)
    for rank in (0, 1):
        pieces = train_pieces(shape, TrainLayout(2, ep=2), rank)
        shapes = train_param_shapes(shape, TrainLayout(2, ep=2), rank)
        params = {n: torch.zeros(s) for n, s in shapes.items()}
        if rank == 1:
            with pytest.raises(ValueError, match=r"late\.safetensors: .* may be incomplete"):
                load_pieces(tmp_path, pieces, params)
            continue
        load_pieces(tmp_path, pieces, params)
        wanted = cut(full, pieces, shapes)
        assert all(torch.equal(params[n], wanted[n].clamp(min=0)) for n in wanted)


def test_the_index_check_passes_a_whole_checkpoint(sharded):
    index = check_index(sharded[0], full_shapes(SHAPE))
    assert set(index.files.values()) == {"model-1.safetensors", "model-2.safetensors"}


def test_a_missing_file_is_named(sharded):
    folder, _ = sharded
    os.remove(folder / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"names 2 files, 1 of them missing: model-2\.safetensors"):
        read_index(folder)
    assert missing_files({"a": "m-1", "b": "m-2", "c": "m-2"}, ["m-1"]) == ["m-2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight_map": ["a"]}', "weight_map must map tensor names to file names, is \\['a'\\]"),
        ('{"weight_map": {"a": 1}}', "weight_map puts a into 1, not a file name"),
        ("{}", "weight_map must map .* is None"),
        ("[]", "weight_map must map"),
        ("{", "Expecting"),
    ],
)
def test_a_file_that_is_no_index_is_named(tmp_path, text, words):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json: {words}"):
        read_index(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        read_index(tmp_path)


def test_missing_and_misshapen_tensors_are_named_together(single):
    folder, full = single
    del full["model.norm.weight"]
    full["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 20)
    write_tensors(folder / "model.safetensors", full)
    with pytest.raises(ValueError) as caught:
        check_index(folder, full_shapes(SHAPE))
    text = str(caught.value)
    assert "model.norm.weight is missing" in text
    assert "layers.1.mlp.up_proj.weight has shape (3, 20), config.json says (24, 20)" in text
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in none"):
        _load(folder, TrainLayout(1), 0)


def test_an_index_that_lies_about_a_tensor_is_found(sharded):
    folder, _ = sharded
    write_tensors(folder / "model-2.safetensors", {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"is missing from model-2\.safetensors"):
        check_index(folder, full_shapes(SHAPE))


def test_a_region_outside_its_tensor_is_named(single):
    folder, full = single
    save_file({**full, "model.norm.weight": torch.zeros(7)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(7,\)"):
        _load(folder, TrainLayout(1), 0)


def test_pieces_that_leave_a_parameter_open_are_refused(single):
    folder, _ = single
    pieces = train_pieces(SHAPE, TrainLayout(1), 0)
    shapes = train_param_shapes(SHAPE, TrainLayout(1), 0)
    params = {n: torch.zeros(s) for n, s in shapes.items()}
    gate = next(i for i, p in enumerate(pieces) if "gate_proj" in p.tensor)
    with pytest.raises(RuntimeError, match=r"linear_fc1\.weight: pieces cover 480 of its 960"):
        load_pieces(folder, pieces[:gate] + pieces[gate + 1 :], params)
    unknown = Piece("model.norm.weight", ((0, 20),), "other", ((0, 20),))
    with pytest.raises(RuntimeError, match="belongs into other"):
        load_pieces(folder, [*pieces, unknown], params)


def test_written_tensors_read_back_equal(tmp_path):
    tensors = {"b": torch.randn(3, 4, dtype=torch.bfloat16), "a": torch.arange(5.0)}
    size = write_tensors(tmp_path / "x.safetensors", tensors)
    assert size == (tmp_path / "x.safetensors").stat().st_size
    back = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)


def test_a_write_that_does_not_fit_is_an_os_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"x\.safetensors: .*File too large"):
            write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "name,expected",
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("pytorch_model.bin", True),
        ("config.json", False),
        ("tokenizer.json", False),
        ("chat_template.jinja", False),
    ],
)
def test_weight_files_are_told_from_the_rest(name, expected):
    assert is_weight_file(name) is expected


def test_a_damaged_file_is_named(single):
    folder, _ = single
    with (folder / "model.safetensors").open("r+b") as f:
        f.truncate(100)
    with pytest.raises(ValueError, match=r"model\.safetensors: .*may be incomplete"):
        _load(folder, TrainLayout(1), 0)
