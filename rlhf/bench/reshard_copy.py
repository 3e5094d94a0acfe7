"""``make bench-reshard-copy``: packing and unpacking on a CPU against memcpy of the same bytes.

One thread, and its own seconds: other programs do not count. Pack and unpack are two copies,
parameter -> staging area and window -> live parameter, the second by the engine's receiver; they
are compared with two plain copies of as many bytes. The bytes do not fit a cache, and the two forms
take turns.
"""

from __future__ import annotations

import argparse
import sys

import torch

from rlhf.bench.rectangles import FORMS, InlineEngine, copy_ratio
from rlhf.bench.result import Gate, finish

LEAST = {"contiguous rows": 0.7, "column slices": 0.4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4, help="of four parameters each")
    parser.add_argument("--width", type=int, default=2048, help="columns of a parameter")
    parser.add_argument("--repetitions", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    results = {}
    for form in FORMS:
        what = form(args.groups, args.width, cpu)
        results[what.name] = copy_ratio(what, cpu, args.repetitions, InlineEngine(what.targets))
    return finish(
        "reshard-copy",
        {"repetitions": args.repetitions, **results},
        [
            Gate(f"{name}: speed / plain copies", results[name]["ratio"], ">=", least)
            for name, least in LEAST.items()
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
