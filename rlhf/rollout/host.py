"""The engine host: a process of its own that holds one SGLang engine for a rank.

A failing scheduler sends SIGQUIT to its parent, which then kills its whole process tree. That tree
is this process and its children, never the rank: an engine's death is an event that the rank
handles. An engine over several nodes has a host on each; that of the first serves requests.

Started by the node's zygote (fork) or by ``python -m rlhf.rollout.host`` (spawn). This module
imports nothing heavy: the process is tied to its owner before it imports SGLang.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import time
import traceback
from typing import NoReturn

from rlhf.rollout.engine import EngineSpec, RoutedLayers
from rlhf.rollout.lifeline import (
    EXIT_DIED,
    Links,
    die_with_parent,
    hide_megatron,
    ignore_usr1,
    name_process,
    write_obituary,
)


def serve(spec: EngineSpec, links: Links, *, fork: bool) -> NoReturn:
    """The whole life of a host. Never returns; the exit status is 0 after a close."""
    started = time.perf_counter()
    name_process("rlhf-engine")
    try:
        from rlhf.rollout.host_follower import Follower
        from rlhf.rollout.host_server import Host
        from rlhf.rollout.sglang_engine import start_engine

        engine = start_engine(
            spec,
            fork=fork,
            obituary_fd=links.obituary,
            close_fds=[links.channel, links.obituary, links.rank],
        )
        if spec.node == 0:
            host = Host(engine, spec, links)
            engine.loop.run_until_complete(host.run(started))
            host.closing.set()
        else:
            Follower(engine, spec, links).run(started)
        engine.shutdown()
        for child in mp.active_children():
            child.join(1.0)  # no zombies for whoever inherits them
    except BaseException as error:  # noqa: BLE001  (the process ends here; the rank is told why)
        traceback.print_exc()
        write_obituary(links.obituary, f"engine host: {type(error).__name__}: {error}")
        os._exit(EXIT_DIED)
    os._exit(0)


def spec_from_json(text: str) -> EngineSpec:
    """The inverse of ``json.dumps(dataclasses.asdict(spec))``."""
    fields = json.loads(text)
    routed = RoutedLayers(**fields["routed"]) if fields["routed"] is not None else None
    return EngineSpec(**fields | {"cores": tuple(fields["cores"]), "routed": routed})


def main() -> NoReturn:
    """``python -m rlhf.rollout.host CHANNEL OBITUARY RANK_PIDFD RANK_PID SPEC``."""
    channel, obituary, rank, rank_pid = map(int, sys.argv[1:5])
    die_with_parent(rank_pid)
    ignore_usr1()
    hide_megatron()
    serve(spec_from_json(sys.argv[5]), Links(channel, obituary, rank), fork=False)


if __name__ == "__main__":
    main()
