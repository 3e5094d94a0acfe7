"""A rank with an engine, run as a process of its own so that it can be killed.

``python -m tests.e2e.engine_rank ZYGOTE FOLDER WORK``: ZYGOTE is an address to join, ``own``,
``node`` (by local rank) or ``none`` (spawn). Prints one JSON line with the pids of the engine, then
does WORK: ``idle``, or ``start`` (does not wait for the engine), or ``close`` (ends everything).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from rlhf.rollout.zygote import Zygote, start_zygote


def main() -> None:
    address, folder, work = sys.argv[1:]
    zygote = {
        "none": lambda: None,
        "node": start_zygote,
        "own": lambda: Zygote.start(f"rlhf-test-rank-{os.getpid()}"),
    }.get(address, lambda: Zygote(address, None))()
    from rlhf.rollout.host_client import EngineHost
    from tests.e2e.engine_case import make_spec

    engine = EngineHost.launch(make_spec(Path(folder)), zygote)
    pids = {} if zygote is None or zygote.pid is None else {"zygote": zygote.pid}
    if work != "start":
        pids |= engine.wait_ready().pids
    print(json.dumps(pids), flush=True)
    if work == "close":
        sys.stdin.readline()
        engine.close()
        if zygote is not None:
            zygote.close()
        return
    signal.pause()


if __name__ == "__main__":
    main()
