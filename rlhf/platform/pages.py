"""Give the pages of a host tensor back to the system; its address stays.

Imported inside SGLang's process: torch and the standard library only.
"""

from __future__ import annotations

import ctypes
import os

from torch import Tensor

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
MADV_DONTNEED = 4  # linux/mman.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def release_pages(tensor: Tensor) -> None:
    """Free the memory of a contiguous tensor in private host memory.

    Its values are lost: whole pages read as zero, and take memory again, when next touched.

    Raises:
        ValueError: the tensor is not contiguous, or lies in shared or device memory.
        OSError: the system refuses.
    """
    if tensor.device.type != "cpu" or tensor.is_shared() or not tensor.is_contiguous():
        raise ValueError("only contiguous tensors in private host memory have pages to release")
    begin = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
    if end <= begin:
        return
    pages = (ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)
    if _LIBC.madvise(*pages):
        code = ctypes.get_errno()
        raise OSError(code, f"madvise of {end - begin} bytes: {os.strerror(code)}")
