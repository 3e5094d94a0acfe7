"""A 64-bit checksum of a rectangle that either end of a transfer computes where the values lie.

The rectangle is a matrix of its last dim's rows; a row is read as words of 8 bytes (of 4, 2 or 1
where its bytes are no multiple). The sum is over words of ``mixed word * column weight * row
weight`` modulo 2**64, all weights odd and scattered over 64 bits. A word of 8 bytes is mixed by
adding its upper half to it, as the highest bits of a product keep little of what they are
multiplied with; so

* any changed byte changes the sum for certain: the upper and the lower half each count by an odd
  number, and their differences are less than 2**32;
* swapped elements, rows or columns change it but for a chance of about 2**-32;
* the order of adding does not matter, so CPU and GPU agree, and so do any strides.

Imported inside SGLang's process: torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STRIP_WORDS = {"cpu": 2**16, "cuda": 2**21}
"""Rows are taken so many words at a time; the mixed words, 8 bytes each, are all the memory that is
needed. On a CPU they stay in its cache. At least one row."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Checksum:
    """Sums rectangles on one device; keeps the weights and the room for mixed words."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._strip_words = STRIP_WORDS["cpu" if self._device.type == "cpu" else "cuda"]
        self._columns = self._rows = torch.empty(0, dtype=torch.int64, device=self._device)
        self._mixed = torch.empty(0, dtype=torch.int64, device=self._device)

    def of(self, values: Tensor) -> Tensor:
        """int64 [], on the device; nothing is waited for.

        Args:
            values: any dtype, any strides; equal shape and bytes give an equal sum.
        """
        total = torch.zeros([], dtype=torch.int64, device=self._device)
        for first_row, matrix in _matrices(values, 0):
            if matrix.numel():
                total += self._sum(matrix, first_row)
        return total

    def _sum(self, matrix: Tensor, first_row: int) -> Tensor:
        num_rows, num_columns = matrix.shape
        width = _word_bytes(num_columns * matrix.element_size())
        num_words = num_columns * matrix.element_size() // width
        columns = self._column_weights(num_words)
        per_strip = max(1, self._strip_words // num_words)
        sums = [
            self._row_sums(_words(matrix[i : i + per_strip], width), columns)
            for i in range(0, num_rows, per_strip)
        ]
        rows = self._row_weights(first_row + num_rows)[first_row:]
        return _product(torch.cat(sums)[None] if len(sums) > 1 else sums[0][None], rows)[0]

    def _row_sums(self, words: Tensor, columns: Tensor) -> Tensor:
        """[rows] int64."""
        if self._mixed.numel() < words.numel():
            self._mixed = torch.empty(words.numel(), dtype=torch.int64, device=self._device)
        mixed = self._mixed[: words.numel()].view(words.shape)
        if words.dtype == torch.int64:
            torch.bitwise_right_shift(words, 32, out=mixed).add_(words)
        else:
            mixed.copy_(words)
        return _product(mixed, columns)

    def _column_weights(self, num: int) -> Tensor:
        if len(self._columns) < num:
            self._columns = _weights(num, 1).to(self._device)
        return self._columns[:num]

    def _row_weights(self, num: int) -> Tensor:
        if len(self._rows) < num:
            self._rows = _weights(num, 2).to(self._device)
        return self._rows[:num]


class Sums:
    """Checksums of rectangles, one after the other."""

    def __init__(self, table: Tensor, device: torch.device) -> None:
        """``table``: [at least as many as there will be] int64 in host memory."""
        self._table = table
        self._checksum = Checksum(device)
        self._sums: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        """Sum up the next one as it is now."""
        self._sums.append(self._checksum.of(part))

    def publish(self) -> None:
        """Write them into the table, in order; on a GPU this waits for them."""
        self._table[: len(self._sums)] = torch.stack(self._sums).cpu()


def _matrices(values: Tensor, first_row: int) -> Iterator[tuple[int, Tensor]]:
    """(number of the first row, matrix) of each part that is a matrix without a copy."""
    if values.dim() <= 2 or values.is_contiguous():
        yield first_row, values.view(-1, values.shape[-1] if values.dim() else 1)
        return
    for part in values:
        yield from _matrices(part, first_row)
        first_row += part.numel() // part.shape[-1]


def _word_bytes(row_bytes: int) -> int:
    return next(width for width in WORDS if row_bytes % width == 0)


def _words(matrix: Tensor, width: int) -> Tensor:
    """The matrix as signed words; a view, or a copy where it does not start at a word."""
    size = matrix.element_size()
    where = (matrix.storage_offset(), *matrix.stride()[:-1])
    if matrix.stride(-1) != 1 or any(at * size % width for at in where):
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(WORDS[width])


def _product(matrix: Tensor, weights: Tensor) -> Tensor:
    """``matrix @ weights``; may overwrite ``matrix``. For int64, torch has it on a CPU alone."""
    return torch.mv(matrix, weights) if matrix.is_cpu else matrix.mul_(weights).sum(1)


def _weights(num: int, salt: int) -> Tensor:
    """[num] int64, odd; a hash of the position, equal wherever it is computed."""
    x = (torch.arange(1, num + 1) + (salt << 40)) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1
