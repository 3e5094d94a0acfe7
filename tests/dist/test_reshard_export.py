"""Load, then export, over gloo ranks: the files come out as they went in."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.spawn import run_ranks
from tests.helpers.tiny_models import make_tiny


def _load_and_export(rank: int, world: int, source: str, folder: str) -> int:
    import torch
    import torch.distributed as dist

    from rlhf.dist.layout import TrainLayout
    from rlhf.reshard.export import Exporter
    from rlhf.reshard.transport import DistTransport
    from rlhf.weights.families import train_param_shapes, train_pieces
    from rlhf.weights.hf_checkpoint import load_pieces
    from rlhf.weights.model_shape import load_model_shape

    def gather(value: object) -> list[object]:
        out: list[object] = [None] * world
        dist.all_gather_object(out, value)
        return out

    shape, layout = load_model_shape(source), TrainLayout(world, tp=2, pp=2)
    shapes = train_param_shapes(shape, layout, rank)
    params = {n: torch.full(s, float("nan")) for n, s in shapes.items()}
    load_pieces(source, train_pieces(shape, layout, rank), params)
    exporter = Exporter(
        shape=shape,
        layout=layout,
        rank=rank,
        params=params,
        dtype=torch.float32,
        transport=DistTransport(),
        gather=gather,
        max_file_bytes=100_000,
    )
    exporter.write(folder, source, lambda: None)
    return len([file for file in exporter.files if file.writer == rank])


def test_export_over_gloo_is_the_inverse_of_loading(tmp_path):
    import torch
    from safetensors.torch import load_file

    source = make_tiny(tmp_path / "source", "qwen2", tied=True, vocab_size=509)
    written = run_ranks(_load_and_export, 4, str(source), str(tmp_path / "hf"))
    assert min(written) >= 1
    before, after = load_file(source / "model.safetensors"), {}
    for path in Path(tmp_path / "hf").glob("*.safetensors"):
        after.update(load_file(path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
