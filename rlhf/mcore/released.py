"""The memory of a model's parameters, given up and taken back.

megatron's gradient buffers keep parameters as views of one storage; the optimizer and the buckets
have views of it too. So the storage itself is emptied: every view is right again once it is back,
at another address maybe.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, UntypedStorage


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
        for name, param in params.items():
            if not param.untyped_storage().resizable():
                raise RuntimeError(f"the memory of {name} cannot be released")
        self._params = params
        self._kept = {name: params[name].detach()[row:].clone() for name, row in kept_rows.items()}
        storages = {s.data_ptr(): s for s in (p.untyped_storage() for p in params.values())}
        self._storages: list[tuple[UntypedStorage, int]] = [
            (storage, storage.nbytes()) for storage in storages.values()
        ]
        for storage, _ in self._storages:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """What was given up; kept rows are counted too."""
        return sum(size for _, size in self._storages)

    @property
    def kept_bytes(self) -> int:
        """What the kept rows take meanwhile."""
        return sum(rows.nbytes for rows in self._kept.values())

    def take_back(self) -> None:
        """Memory of zeros and the kept rows; the rest waits to be written."""
        device = next(iter(self._params.values())).device
        for storage, size in self._storages:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage).zero_()  # type: ignore[call-overload]
        for name, rows in self._kept.items():
            param = self._params[name].detach()
            param[len(param) - len(rows) :].copy_(rows)
        self._storages, self._kept = [], {}
