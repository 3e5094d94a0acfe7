"""Where the nodes of an engine meet: a host that all of them can reach, and ports that are free.

Launchers agree on MASTER_ADDR alone, so that is what addresses are made of; a node's own name may
mean nothing, or its loopback, elsewhere. The first node of an engine chooses the ports, as it alone
can know which are free. All of it travels in one small gather when the ranks have met.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rlhf.dist.ports import ENGINE_PORTS

ROOM = range(12000, 20000)
"""Below the ports that the kernel gives out, those that SGLang takes inside a node, and torchrun's.
"""


@dataclass(frozen=True, slots=True)
class View:
    """What one rank sees."""

    master: str
    """The address that MASTER_ADDR means here."""
    own: str
    """The address of this node towards that."""
    port: int
    """The first of ``ENGINE_PORTS`` free ones; 0 where no engine needs them."""


def look_around(master_host: str, master_port: int, port: int) -> View:
    """This rank's view; sends nothing.

    Raises:
        OSError: MASTER_ADDR has no address here.
    """
    found = socket.getaddrinfo(master_host, master_port, type=socket.SOCK_DGRAM)
    family, kind, _, _, there = found[0]
    with socket.socket(family, kind) as sock:
        sock.connect(there)  # of datagrams: only looks up the way
        return View(str(there[0]), str(sock.getsockname()[0]), port)


def engine_address(views: Sequence[View], leader: int, ranks_per_node: int) -> str:
    """``host:port`` of the engine that rank ``leader`` leads. Pure.

    Args:
        views: of all ranks, in order.
    """
    on_master = leader < ranks_per_node  # a host may see itself as its loopback
    host = views[-1].master if on_master else views[leader].own
    return f"[{host}]:{views[leader].port}" if ":" in host else f"{host}:{views[leader].port}"


def port_blocks(
    engine: int, num_engines: int, master_port: int, planned: int | None = None
) -> list[int]:
    """First ports of the blocks that an engine may take, in the order of trial. Pure.

    The planned one, if there is a plan. Of the others, no two engines of a run share one. Runs on
    one machine, which have unlike MASTER_PORTs, begin at unlike places, and none takes its own
    MASTER_PORT.
    """
    mine = ROOM[engine * ENGINE_PORTS :: num_engines * ENGINE_PORTS]
    start = master_port * 97 % len(mine)
    turned = [*([] if planned is None else [planned]), *mine[start:], *mine[:start]]
    return [first for first in turned if not first <= master_port < first + ENGINE_PORTS]


def free_block(firsts: Iterable[int]) -> int:
    """The first block of which nobody on this node holds a port.

    Raises:
        RuntimeError: there is none.
    """
    for first in firsts:
        with ExitStack() as stack:
            try:
                for port in range(first, first + ENGINE_PORTS):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError(
        f"no {ENGINE_PORTS} neighbouring ports are free between {ROOM.start} and "
        f"{ROOM.stop}, where the nodes of an engine meet: end what holds them"
    )
