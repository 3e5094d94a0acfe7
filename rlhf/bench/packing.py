"""``make bench-packing``: how full micro-batches are, and how even the DP ranks.

Fill is real tokens / (micro-batches * token budget). Ranks run whole micro-batches, all as many,
so the best possible fill has ceil(tokens / (ranks * budget)) of them on each rank.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from rlhf.bench.result import Gate, finish
from rlhf.packing import Budget, SequenceCost, schedule_microbatches

MAX_TOKENS = 32768


def log_normal_lengths(num: int, seed: int) -> list[int]:
    """Response lengths as reasoning models give them: median 2k, a tail up to 32k tokens."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(mean=np.log(2048), sigma=1.0, size=num)
    return np.clip(drawn, 16, MAX_TOKENS).astype(int).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--align", type=int, default=8)
    args = parser.parse_args()
    budget = Budget(tokens=MAX_TOKENS, align=args.align)
    # 7B shape: attention overtakes the rest at about 70k tokens
    cost = SequenceCost(per_token=1.3e10, per_square=2.0e5)
    efficiency, fill, imbalance, seconds = [], [], [], []
    for seed in range(5):
        lengths = log_normal_lengths(args.sequences, seed)
        began = time.perf_counter()
        schedule = schedule_microbatches(lengths, args.dp, budget, cost)
        seconds.append(time.perf_counter() - began)
        used = len(schedule[0])
        fewest = budget.fewest(sum(budget.rounded(n) for n in lengths), args.dp)
        loads = [sum(cost(lengths[i]) for m in rank for i in m) for rank in schedule]
        fill.append(sum(lengths) / (used * args.dp * budget.tokens))
        efficiency.append(fill[-1] / (sum(lengths) / (fewest * args.dp * budget.tokens)))
        imbalance.append(max(loads) / (sum(loads) / len(loads)))
    return finish(
        "packing",
        {
            "sequences": args.sequences,
            "dp": args.dp,
            "fill": min(fill),
            "fill_over_best_possible": min(efficiency),
            "dp_imbalance": max(imbalance),
            "schedule_s": max(seconds),
        },
        [
            Gate("efficiency (fill / best possible fill)", min(efficiency), ">=", 0.99),
            Gate("DP imbalance (max / mean cost)", max(imbalance), "<=", 1.01),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
