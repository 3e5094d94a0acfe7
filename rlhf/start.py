"""A run on this node: everything checked once, then one process per rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf.config.schema import Config


def start(config: Config, source: str, arguments: Sequence[str], logs: Path | None = None) -> int:
    """Check the configuration and its data, then run ``rlhf.train`` on its ranks; returns the exit
    status. Under srun, which starts this on every node, on the ranks of this node.

    Args:
        source: names the configuration in messages.
        arguments: of ``rlhf.train``.
        logs: folder for the output of each rank; None: that of this process.

    Raises:
        ValueError: what the user gave cannot run.
        LauncherError: what Slurm says contradicts itself.
    """
    from rlhf.dist.node import num_nodes, this_node
    from rlhf.launch import Job, default_ranks, launch
    from rlhf.preflight import check, check_data
    from rlhf.solved import resolved

    ranks = config.dist.ranks or default_ranks() * num_nodes()
    node = this_node(ranks)
    config, _ = resolved(config, ranks, ranks // num_nodes(), source)  # a rank says what it is
    check(config, ranks, source)
    check_data(config)
    job = Job("rlhf.train", arguments, config.dist.stop_grace_s, logs)
    return launch(job, ranks, node)
