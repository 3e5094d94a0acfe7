"""Hugging Face weight files: the only door to safetensors.

A folder holds ``model.safetensors``, or several files with ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.weights.piece import Box, Piece, box_size

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """Which file of a folder holds which tensor."""

    folder: Path
    files: Mapping[str, str]  # tensor -> file name

    def path(self, tensor: str) -> Path:
        """The file that holds ``tensor``.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        if tensor not in self.files:
            raise ValueError(
                f"{self.folder}: tensor {tensor} is in none of the safetensors files; it "
                "is incomplete, or of another architecture than its config.json says"
            )
        return self.folder / self.files[tensor]


def is_weight_file(name: str) -> bool:
    """Whether a file of a model folder holds weights (of any format) or their index."""
    return name.endswith(WEIGHT_SUFFIXES)


def missing_files(weight_map: Mapping[str, str], present: Iterable[str]) -> list[str]:
    """Files that an index names and a folder does not have, sorted."""
    return sorted(set(weight_map.values()) - set(present))


def missing_tensors(expected: Iterable[str], present: Collection[str]) -> list[str]:
    """Tensors that a model has and a checkpoint does not, in the order of ``expected``."""
    return [name for name in expected if name not in present]


def read_index(folder: str | Path) -> CheckpointIndex:
    """Find the weight files of ``folder``.

    Raises:
        ValueError: there are none, some that the index names are missing, or it is no index.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = _read_weight_map(index)
        missing = missing_files(weight_map, (p.name for p in folder.glob("*.safetensors")))
        if missing:
            raise ValueError(
                f"{folder}: {INDEX_NAME} names {len(set(weight_map.values()))} files, "
                f"{len(missing)} of them missing: {', '.join(missing)}; download them again"
            )
        return CheckpointIndex(folder, weight_map)
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ValueError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there")
    with _open(single) as f:
        return CheckpointIndex(folder, dict.fromkeys(f.keys(), SINGLE_NAME))


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{index}: weight_map must map tensor names to file names, is {weight_map!r:.80}"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ValueError(f"{index}: weight_map puts {name} into {file!r:.80}, not a file name")
    return weight_map


def check_index(folder: str | Path, shapes: Mapping[str, Sequence[int]]) -> CheckpointIndex:
    """The index of ``folder``, after a look at every file's header.

    Args:
        shapes: HF name -> shape that the model's config asks for.

    Raises:
        ValueError: a file or tensor is missing, or has another shape; all faults at once.
    """
    index = read_index(folder)
    faults = [f"{name} is missing" for name in missing_tensors(shapes, index.files)]
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        if name in index.files:
            by_file[index.files[name]].append(name)
    for file, names in by_file.items():
        with _open(index.folder / file) as f:
            inside = set(f.keys())
            for name in names:
                if name not in inside:
                    faults.append(f"{name} is missing from {file}, where the index puts it")
                elif (found := tuple(f.get_slice(name).get_shape())) != tuple(shapes[name]):
                    faults.append(f"{name} has shape {found}, config.json says {shapes[name]}")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"{folder}: {shown}")
    return index


def load_pieces(folder: str | Path, pieces: Sequence[Piece], params: Mapping[str, Tensor]) -> None:
    """Fill ``params`` in place from the checkpoint, reading only the slices in ``pieces``.

    Values are cast to each parameter's dtype; rows that no piece covers (vocabulary padding at the
    end of a parameter) become zero.

    Raises:
        ValueError: a file or tensor is missing, a file is damaged, or a region lies outside its
            tensor.
        RuntimeError: pieces and parameters do not belong together.
    """
    padded = _check_coverage(pieces, params)
    index = read_index(folder)
    by_file: dict[Path, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_file[index.path(piece.tensor)].append(piece)
    for name, covered_rows in padded.items():
        params[name].data[covered_rows:].zero_()
    for path, inside in by_file.items():
        with _open(path) as f:
            for piece in inside:
                full = f.get_slice(piece.tensor)
                _check_region(path, piece, tuple(full.get_shape()))
                target = params[piece.param].data[_slices(piece.local)]
                values = full[_slices(piece.region)]
                values = values.mT if piece.transposed else values
                target.copy_(values.reshape(target.shape))


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> int:
    """Write one safetensors file in the order of ``tensors``; returns its size in bytes.

    Raises:
        OSError: no space, no permission.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), str(path), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    Path(path).chmod(0o644)  # safetensors makes a temporary file, which only its owner may read
    return Path(path).stat().st_size


def write_index(folder: str | Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of a folder of several files; ``files``: tensor -> file name."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    path = Path(folder) / INDEX_NAME
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is a ValueError that names it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as f:
            yield f
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}; the file may be incomplete") from error


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _check_region(path: Path, piece: Piece, shape: tuple[int, ...]) -> None:
    fits = len(shape) == len(piece.region) and all(
        stop <= size for (_, stop), size in zip(piece.region, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{path}: {piece.tensor} has shape {shape}, {piece.param} needs {piece.region} of it; "
            "config.json and the weights do not belong together"
        )


def _check_coverage(pieces: Sequence[Piece], params: Mapping[str, Tensor]) -> dict[str, int]:
    """Parameter -> rows covered, for those with padding rows at their end."""
    covered: dict[str, int] = defaultdict(int)
    rows: dict[str, int] = defaultdict(int)
    for piece in pieces:
        if piece.param not in params:
            raise RuntimeError(
                f"{piece.tensor} belongs into {piece.param}, which is not among the model's "
                f"{len(params)} parameters"
            )
        shape = tuple(params[piece.param].shape)
        if len(shape) != len(piece.local) or any(
            stop > size for (_, stop), size in zip(piece.local, shape, strict=True)
        ):
            raise RuntimeError(f"{piece.param} has shape {shape}, a piece goes to {piece.local}")
        covered[piece.param] += box_size(piece.local)
        rows[piece.param] = max(rows[piece.param], piece.local[0][1])
    padded = {}
    for name, param in params.items():
        if covered[name] == param.numel():
            continue
        row_size = param.numel() // max(1, param.shape[0])
        if covered[name] != rows[name] * row_size:
            raise RuntimeError(
                f"{name}: pieces cover {covered[name]} of its {param.numel()} elements, and not as "
                "leading rows"
            )
        padded[name] = rows[name]
    return padded
