"""An explanation as a block of text."""

from __future__ import annotations

import textwrap

from rlhf.dist.layout import RolloutLayout, TrainLayout
from rlhf.dist.layout_text import TRAIN_KEYS, rollout_text
from rlhf.reshard.explain import GIGA, MESSAGE_S, Explanation

WIDTH = 88
INDENT = 11


def explanation_text(e: Explanation, model: str, train: TrainLayout, rollout: RolloutLayout) -> str:
    """About 25 lines; sizes are per rank unless it says otherwise."""
    nodes = f"{e.nodes} nodes" if e.nodes > 1 else "one node"
    where = f"{e.ranks} rank{'s' * (e.ranks > 1)} on {nodes}"
    return "\n".join(
        [
            f"{model}, {_size(e.model_bytes)}, {where}",
            f"  train    {train_words(train)}: {_size(e.train_shard_bytes_mean)} per rank",
            f"  rollout  {rollout_words(rollout)}: {_size(e.rollout_shard_bytes_mean)} per rank",
            "",
            *_bytes(e),
            "",
            *_traffic(e),
            "",
            *_seconds(e),
        ]
    )


def train_words(layout: TrainLayout) -> str:
    """``tp=8,pp=4,cp=4,ep=32,etp=1,last=13, dp 1``; sizes of one are left out."""
    sizes = {name: getattr(layout, name) for name in TRAIN_KEYS}
    words = [
        f"{name}={size}"
        for name, size in sizes.items()
        if size is not None and (size > 1 or name in ("etp", "first", "last"))
    ]
    return ", ".join([*([",".join(words)] if words else []), f"dp {layout.dp}"])


def rollout_words(layout: RolloutLayout) -> str:
    """``2 engines of 64 (tp=64,dp=8,ep=64,a2a=deepep)``."""
    num, size = layout.num_engines, layout.engine_size
    return f"{num} engine{'s' * (num > 1)} of {size} ({rollout_text(layout)})"


def _bytes(e: Explanation) -> list[str]:
    head = f"{'each rank receives':<30}{'plan':>12}{'least':>12}{'ratio':>8}{'full gather':>20}"
    least, crossing = e.lower_bound_bytes / e.ranks, e.cross_node_bytes_total / e.ranks
    least_crossing = e.cross_node_lower_bound_bytes / e.ranks
    mean = e.moved_bytes_per_rank_mean
    times = f" ({e.full_gather_bytes_per_rank / mean:.1f}x)" if mean else ""
    gather = f"{_size(e.full_gather_bytes_per_rank)}{times}"
    return [
        head,
        "-" * 82,
        f"{'from other ranks':<30}{_size(mean):>12}{_size(least):>12}{_ratio(mean, least):>8}"
        f"{gather:>20}",
        f"{'  the most of any rank':<30}{_size(e.moved_bytes_per_rank_max):>12}",
        f"{'  of it over the network':<30}{_size(crossing):>12}{_size(least_crossing):>12}"
        f"{_ratio(crossing, least_crossing):>8}",
        f"{'from itself':<30}{_size(e.local_bytes_total / e.ranks):>12}",
    ]


def _traffic(e: Explanation) -> list[str]:
    links = e.bytes_by_link
    per_round = e.messages / max(1, e.rounds) / e.ranks
    return [
        f"all ranks  same rank {_size(links['self'])}, same node {_size(links['node'])}, "
        f"same rail {_size(links['rail'])}, other {_size(links['fabric'])}",
        f"schedule   {e.messages:,} messages in {e.rounds} rounds "
        f"({per_round:.1f} per rank and round)",
        f"staging    {_size(e.staging_bytes)} per rank at most",
        f"sending    the busiest rank sends {e.send_balance:.3f} x the mean; "
        f"no choice of sources is below {e.send_balance_bound:.3f}",
        f"planning   {e.plan_build_s_per_rank:.2f} s per rank, once per run",
    ]


def _seconds(e: Explanation) -> list[str]:
    return [
        f"time       {_time(e.predicted_s)} predicted, {_time(e.floor_s)} at least "
        "for the busiest link of this plan",
        f"           full gather at least {_time(e.full_gather_floor_s)}, or "
        f"{_time(e.full_gather_node_floor_s)} with one copy per node",
        *_folded(
            f"assumed    {e.nic_gbs:g} GB/s per rank between nodes, {e.nvlink_gbs:g} GB/s inside "
            "a node, each way at once. Rounds follow one another; each takes as long as its "
            f"slowest rank, which is its busiest link and {MESSAGE_S * 1e6:.0f} us per message. "
            "Packing, writing and copies on the rank itself are taken to hide behind the wire. "
            "GB are 1e9 bytes."
        ),
    ]


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * INDENT)


def _ratio(value: float, least: float) -> str:
    return f"{value / least:.3f}" if least else "-"


def _size(num_bytes: float) -> str:
    if not num_bytes:
        return "0"
    if num_bytes >= 0.995e9:
        return f"{num_bytes / GIGA:.2f} GB"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 0.995e6 else f"{num_bytes / 1e3:.1f} kB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
