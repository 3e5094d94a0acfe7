"""``rlhf convert``: Hugging Face folder <-> Megatron distributed checkpoint, in one process.

A checkpoint of Megatron's distributed format loads under any layout, so one process can write what
many ranks read and read what many ranks wrote. The model must fit into this machine's memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.config.schema import ModelSection, TrainSection
from rlhf.dist.layout import TrainLayout
from rlhf.saved import COMPLETE, checkpoint_path, complete_steps, read_record, select_resume
from rlhf.weights.model_shape import load_model_shape
from rlhf.weights.whole_folder import whole_folder

MODEL_SOURCE = "hf_source"
"""Key of run.json: the HF folder whose configuration and tokenizer belong to the weights."""


def convert(source: Path, target: Path) -> str:
    """Convert by what ``source`` is; returns a line that says what was done.

    Of a run's folder the newest checkpoint is taken.

    Raises:
        ValueError: ``source`` is neither, or ``target`` exists.
    """
    if target.exists():
        raise ValueError(f"{target} exists; give a folder that does not")
    checkpoints = source / "checkpoints"
    newest = select_resume(complete_steps(checkpoints))
    if newest is not None:
        source = checkpoint_path(checkpoints, newest)
    if (source / "config.json").is_file():
        _to_megatron(source, target)
        return f"{target}: Megatron checkpoint of {source}"
    if (source / COMPLETE).is_file():
        model = _to_hf(source, target)
        return f"{target}: Hugging Face folder of {source} (configuration and tokenizer of {model})"
    raise ValueError(
        f"{source} is neither a Hugging Face folder (config.json) nor a complete checkpoint "
        f"({COMPLETE}) of a run, such as RUN or RUN/checkpoints/step_00000030"
    )


def _to_megatron(source: Path, target: Path) -> None:
    from rlhf.mcore.checkpoint import save_weights
    from rlhf.mcore.model import build_model
    from rlhf.weights.families import train_pieces
    from rlhf.weights.hf_checkpoint import load_pieces

    shape, layout = load_model_shape(source), TrainLayout(1)
    section = ModelSection.model_validate({"path": str(source), "dtype": _dtype(source)})
    record = {"steps_done": 0, MODEL_SOURCE: str(source.resolve()), "dtype": section.dtype}
    with whole_folder(target) as writing, _alone(layout):
        model = build_model(shape, layout, section, TrainSection(), trainable=False)
        load_pieces(source, train_pieces(shape, layout, 0), model.params)
        save_weights(writing, model)
        (writing / COMPLETE).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _to_hf(source: Path, target: Path) -> Path:
    import torch

    from rlhf.mcore.checkpoint import load_weights
    from rlhf.mcore.model import build_model
    from rlhf.reshard.export import Exporter
    from rlhf.reshard.transport import LocalHub

    record = read_record(source)
    settings = record.get("config", {}).get("model", {})
    folder = Path(record.get(MODEL_SOURCE) or settings["path"])
    dtype = record.get("dtype") or settings["dtype"]
    shape, layout = load_model_shape(folder), TrainLayout(1)
    section = ModelSection(path=str(folder), dtype=dtype)
    with _alone(layout):
        model = build_model(shape, layout, section, TrainSection(), trainable=False)
        load_weights(source, model)
        exporter = Exporter(
            shape=shape,
            layout=layout,
            rank=0,
            params=model.params,
            dtype=getattr(torch, dtype),
            transport=LocalHub(1).transport(0),
            gather=lambda value: [value],
        )
        exporter.write(target, folder, lambda: None)
    return folder


def _dtype(folder: Path) -> str:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    return name if name in ("float32", "bfloat16") else "bfloat16"


@contextmanager
def _alone(layout: TrainLayout) -> Iterator[None]:
    """Megatron's grid of one rank in this process."""
    import torch.distributed as dist

    from rlhf.mcore import parallel
    from rlhf.platform import megatron_cpu

    megatron_cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel.initialize(layout, timeout_s=60, seed=0)
        yield
        parallel.shutdown()
    finally:
        dist.destroy_process_group()
