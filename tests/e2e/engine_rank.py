"""A rank with an engine, run as a process of its own so that it can be killed.

``python -m tests.e2e.engine_rank ZYGOTE FOLDER WORK``: ZYGOTE is an address to join, ``own`` or
``none`` (spawn). Prints one JSON line with the pids of the engine, then does WORK: ``idle`` or
``start`` (is killed before the engine is ready).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from rlhf.rollout.zygote import Zygote


def main() -> None:
    address, folder, work = sys.argv[1:]
    zygote = {
        "none": lambda: None,
        "own": lambda: Zygote.start(f"rlhf-test-rank-{os.getpid()}"),
    }.get(address, lambda: Zygote(address, None))()
    from rlhf.rollout.host_client import EngineHost
    from tests.e2e.engine_case import make_spec

    engine = EngineHost.launch(make_spec(Path(folder)), zygote)
    pids = {} if zygote is None or zygote.pid is None else {"zygote": zygote.pid}
    if work != "start":
        pids |= engine.wait_ready().pids
    print(json.dumps(pids), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
