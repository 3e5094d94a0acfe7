"""The memory of a model's parameters, given up and taken back.

megatron's gradient buffers keep parameters as views of one storage; the optimizer and the buckets
have views of it too. So the storage itself is emptied: every view is right again once it is back,
at another address maybe.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, UntypedStorage


class Storages:
    """All storages under some parameters; a storage may have parts that are none of them."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        """
        Raises:
            RuntimeError: the memory of a parameter is not its own to give up, such as a file's;
                names it.
        """
        for name, param in params.items():
            if not param.untyped_storage().resizable():
                raise RuntimeError(f"the memory of {name} cannot be released")
        found = {s.data_ptr(): s for s in (p.untyped_storage() for p in params.values())}
        self._storages: list[tuple[UntypedStorage, int]] = [(s, s.nbytes()) for s in found.values()]
        self._device = next(iter(params.values())).device if params else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_bytes(self) -> int:
        """Of all of them, when they are there."""
        return sum(size for _, size in self._storages)

    @property
    def resident_bytes(self) -> int:
        """What they take now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def release(self) -> None:
        """Give up the memory; what is in it is lost. Nothing may use the parameters then."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def take_back(self, *, zero: bool = True) -> None:
        """Memory again, of zeros or of anything."""
        for storage, size in self._storages:
            storage.resize_(size)
        if zero:
            for part in self.parts():
                part.zero_()

    def parts(self) -> list[Tensor]:
        """The bytes of each storage, [size] uint8; views."""
        return [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # type: ignore[call-overload]
            for storage, _ in self._storages
        ]


class KeptRows:
    """The last rows of some parameters, kept while the memory of all is away."""

    def __init__(self, params: Mapping[str, Tensor], first_rows: Mapping[str, int]) -> None:
        """``first_rows``: parameter -> the first of its rows that are kept."""
        self._params = params
        self._rows = {n: params[n].detach()[row:].clone() for n, row in first_rows.items()}

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def put_back(self) -> None:
        for name, rows in self._rows.items():
            param = self._params[name].detach()
            param[len(param) - len(rows) :].copy_(rows)


class ReleasedParams:
    """Parameters without memory, until :meth:`take_back`; nothing may use them meanwhile."""

    def __init__(self, params: Mapping[str, Tensor], kept_rows: Mapping[str, int]) -> None:
        """Release all storages of ``params``.

        Args:
            params: by name; a storage may have parts that are none of them, which are lost.
            kept_rows: parameter -> the first of its rows that are kept in memory.

        Raises:
            RuntimeError: the memory of a parameter is not its own to give up, such as a file's;
                names it. Nothing is released then.
        """
        self._storages = Storages(params)
        self._kept = KeptRows(params, kept_rows)
        self._storages.release()

    @property
    def num_bytes(self) -> int:
        """What was given up; kept rows are counted too."""
        return self._storages.num_bytes

    @property
    def kept_bytes(self) -> int:
        """What the kept rows take meanwhile."""
        return self._kept.num_bytes

    def take_back(self) -> None:
        """Memory of zeros and the kept rows; the rest waits to be written."""
        self._storages.take_back()
        self._kept.put_back()
