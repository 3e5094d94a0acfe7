"""What trainer rank and engine process agree on: the shared window between them.

A window is one uint8 tensor in shared memory (memfd on a CPU, CUDA IPC on a GPU) per engine rank:

    [0, HEAD_BYTES)            int64 words below, then error text from ERROR_TEXT_AT
    [HEAD_BYTES, ...)          two staging areas of ``area_bytes`` each; round r lies in area r % 2

The rank posts rounds, the receiver reports them done. Area r % 2 may be overwritten for round r
only when round r - 2 is done. Imported inside SGLang's process: standard library only.
"""

from __future__ import annotations

from enum import IntEnum

HEAD_BYTES = 65536
ERROR_TEXT_AT = 4096
ERROR_TEXT_BYTES = HEAD_BYTES - ERROR_TEXT_AT
ALIGN_BYTES = 16
"""Every transfer starts at a multiple of this inside its area."""


class Word(IntEnum):
    """Index of an int64 word at the head of the window."""

    POSTED = 0  # rank: rounds whose bytes are in the window
    DONE = 1  # receiver: rounds written into live parameters
    END = 2  # rank: 1 = no more rounds, leave the loop; 2 = abandon the update
    ERROR = 3  # receiver: length of the error text, 0 = no error
    BYTES = 4  # receiver: bytes written in this update
    SEQUENCE = 5  # receiver, last of all: number of the update that it has finished


def align(num_bytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return (num_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES
