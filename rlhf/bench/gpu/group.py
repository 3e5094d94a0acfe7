"""Collectives and our transport over a process group of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlhf.bench.gpu.check import Figures, Sizes, one_rank, require
from rlhf.reshard.transport import DistTransport, Transport

LIMIT_S = 20.0


def check_group(device: torch.device, sizes: Sizes) -> Figures:
    """All-reduce on the device and on the host; over NCCL the rank also sends to itself."""
    with one_rank(device, bind=True):
        for place in {device, torch.device("cpu")}:
            values = torch.arange(1000.0, device=place)
            dist.all_reduce(values)
            require(
                torch.equal(values.cpu(), torch.arange(1000.0)),
                f"all_reduce over one rank changed values on {place}",
            )
        transport = DistTransport(device=device)
        transport.start([], [])
        transport.wait(LIMIT_S, _no_poll)
        # gloo has no connection of a rank to itself
        arrived = send_to_itself(transport, sizes.message_bytes) if device.type == "cuda" else 0
        transport.close()
        backend = dist.get_backend()
    return {"backend": backend, "bytes_to_itself": arrived}


def send_to_itself(transport: Transport, num_bytes: int) -> int:
    """Rank 0 sends to rank 0; the bytes that arrived."""
    sent = (torch.arange(num_bytes, device=transport.device) % 251).to(torch.uint8)
    arrived = torch.zeros_like(sent)
    transport.start([(sent, 0)], [(arrived, 0)])
    transport.wait(LIMIT_S, _no_poll)
    require(torch.equal(sent, arrived), f"{num_bytes} bytes sent to itself arrived changed")
    return num_bytes


def _no_poll() -> None:
    """Nothing to look after while waiting."""
