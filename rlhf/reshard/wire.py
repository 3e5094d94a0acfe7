"""What trainer rank and engine process agree on: the shared window between them.

A window is a memfd per engine rank, mapped by the rank and by the engine process:

    [0, HEAD_BYTES)            int64 words below, then text from TEXT_AT
    [HEAD_BYTES, sums_at)      two staging areas of ``area_bytes`` each; round r lies in area r % 2
    [sums_at, ...)             the receiver's checksum of each write, int64, in the order of writes

With a GPU the two areas lie in device memory instead (CUDA IPC); the rest stays in the memfd.

The rank posts rounds, the receiver reports them done. Area r % 2 may be overwritten for round r
only when round r - 2 is done. An update has a number; the rank clears the words and then writes
the number to START, and the receiver reads no other word of that update before it sees it there.

In a read, which is numbered like an update, the two change places: the receiver fills area r % 2
with slices of live parameters and sets DONE to r + 1; the rank sends round r, copies what it keeps
of it, and sets POSTED to r + 1. The receiver fills round r only when POSTED is at least r - 1.
What the rank passes on for others it puts into the area itself, at offsets that nobody reads into.
Imported inside SGLang's process: standard library only.

Messages to the receiver are JSON objects:

    {"op": "open", "path", "bytes", "area_bytes", "sums_at", "rounds", "back"}
                                                              map, check the model
    {"op": "update", "sequence", "limit_s", "verify"}         write rounds until END; if asked to
                                                              ``verify``, sum up what they left
    {"op": "read", "sequence", "limit_s"}                     read rounds until END
    {"op": "sleep", "free"}                                   spoil or free weights in host memory
    {"op": "table"}                                           describe the live parameters
    {"stages": [message, ...]}                                one per pipeline stage
    {"op": "join"}                                            only in stages: end of their update
"""

from __future__ import annotations

from enum import IntEnum

HEAD_BYTES = 65536
TEXT_AT = 4096
TEXT_BYTES = HEAD_BYTES - TEXT_AT
ALIGN_BYTES = 16
"""Every transfer starts at a multiple of this inside its area."""


class Word(IntEnum):
    """Index of an int64 word at the head of the window."""

    POSTED = 0  # rank: rounds whose bytes are in the window; in a read, have been taken out of it
    DONE = 1  # receiver: rounds written into live parameters; in a read, put into the window
    END = 2  # rank: no more rounds will be posted, and why (End)
    ERROR = 3  # receiver: length of the error text, 0 = no error
    BYTES = 4  # receiver: bytes written, or read, in this update
    SEQUENCE = 5  # receiver, last of all: update that it has left; below 0: window not yet opened
    START = 6  # rank, last of all: number of the update whose words are clear
    REPLY = 7  # receiver: length of a reply (zlib-compressed JSON) in the text area, 0 = none


class End(IntEnum):
    """Values of Word.END."""

    OPEN = 0
    COMPLETE = 1
    ABANDON = 2


def align(num_bytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return (num_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES
