"""A run on this machine: everything checked once, then one process per rank."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.config.schema import Config


def start(config: Config, source: str, arguments: Sequence[str]) -> int:
    """Check the configuration and its data, then run ``rlhf.train`` on its ranks; returns the exit
    status.

    Args:
        source: names the configuration in messages.
        arguments: of ``rlhf.train``.

    Raises:
        ValueError: what the user gave cannot run.
    """
    from rlhf.launch import default_ranks, launch
    from rlhf.preflight import check, check_data

    ranks = config.dist.ranks or default_ranks()
    check(config, ranks, source)
    check_data(config)
    return launch("rlhf.train", arguments, ranks, config.dist.stop_grace_s)
