"""A window that one process fills and the receiver of another empties into its parameters."""

from __future__ import annotations

import json
import multiprocessing as mp
from collections.abc import Mapping
from typing import Any

import torch

from rlhf.bench.gpu.check import CheckFailed, Figures, Sizes, free_gib, require
from rlhf.bench.rectangles import DTYPE, LIMIT_S, Movement, Rectangles, column_slices, module_of
from rlhf.rollout import receiver

NUM_UPDATES = 5
LEAK_GIB = 0.125
"""What a driver may keep; a window of the full sizes has 0.5 GiB."""


class ProcessEngine:
    """The receiver in a process of its own, its parameters on the device, NaN at first."""

    call_s = None

    def __init__(self, what: Rectangles, device: torch.device) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        shapes = {name: tuple(tensor.shape) for name, tensor in what.targets.items()}
        self._process = context.Process(
            target=_serve, args=(theirs, shapes, str(device)), daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(self, message: Mapping[str, Any]) -> None:
        self._pipe.send(("load", message))

    def poll(self) -> None:
        require(self._process.is_alive(), f"the engine ended with {self._process.exitcode}")

    def end(self) -> None:
        self._take()

    def addresses(self) -> dict[str, int]:
        """Of the live parameters."""
        return self._ask("addresses")

    def fetch(self, what: Rectangles) -> None:
        """Copy the live parameters into the targets."""
        for name, data in self._ask("bytes").items():
            values = torch.frombuffer(bytearray(data), dtype=DTYPE)
            what.targets[name].copy_(values.view(what.targets[name].shape))

    def device_bytes(self) -> int:
        """What the process has allocated on its device itself."""
        return self._ask("device bytes")

    def close(self) -> None:
        """Let the process end.

        Raises:
            CheckFailed: it does not, or not well.
        """
        self._pipe.close()
        self._process.join(LIMIT_S)
        require(self._process.exitcode == 0, f"the engine ended with {self._process.exitcode}")

    def _ask(self, question: str) -> Any:
        self._pipe.send((question, None))
        return self._take()

    def _take(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise CheckFailed(f"no answer from the engine in {LIMIT_S:g} s")
        return self._pipe.recv()


def _serve(pipe: Any, shapes: Mapping[str, tuple[int, ...]], device: str) -> None:
    model = module_of(
        {n: torch.full(s, float("nan"), dtype=DTYPE, device=device) for n, s in shapes.items()}
    )
    params = dict(model.named_parameters())
    while True:
        try:
            question, argument = pipe.recv()
        except EOFError:
            return
        if question == "load":
            receiver.load(model, [(json.dumps(argument), torch.empty(0))])
            pipe.send(None)
        elif question == "addresses":
            pipe.send({name: p.data_ptr() for name, p in params.items()})
        elif question == "device bytes":
            on_gpu = torch.device(device).type == "cuda"
            pipe.send(torch.cuda.memory_allocated(device) if on_gpu else 0)
        else:
            pipe.send(
                {n: p.detach().cpu().view(torch.uint8).numpy().tobytes() for n, p in params.items()}
            )


def check_window(device: torch.device, sizes: Sizes) -> Figures:
    """Five updates through the real receiver: every element, the same addresses, nothing left."""
    what = column_slices(1, sizes.width, device)
    Movement(what, device).run()  # kernels are loaded, which takes memory
    what.num_wrong()
    before = free_gib(device)
    during, seconds, own_bytes = _update_often(what, device)
    after = free_gib(device)
    require_no_leak(before, after)
    return {
        "bytes": what.num_bytes,
        "updates": NUM_UPDATES,
        "unpack_gb_per_s": what.num_bytes / 1e9 / min(seconds) if device.type == "cuda" else None,
        "engine_device_bytes": own_bytes,
        "free_gib": {"before": before, "during": during, "after": after},
    }


def require_no_leak(before: float | None, after: float | None) -> None:
    """Free GiB before the window and after it; on a CPU nothing is known of them.

    Raises:
        CheckFailed: more than LEAK_GIB is gone.
    """
    if before is not None and after is not None:
        lost = before - after
        require(lost <= LEAK_GIB, f"{lost:.3f} GiB of the device are gone after the window closed")


def _update_often(what: Rectangles, device: torch.device) -> tuple[float | None, list[float], int]:
    """Free GiB with all in place, seconds of each unpack, bytes that the engine allocated."""
    engine = ProcessEngine(what, device)
    addresses = engine.addresses()
    movement = Movement(what, device, engine)
    seconds = []
    for number in range(NUM_UPDATES):
        for tensor in what.sources.values():
            tensor.copy_(tensor.roll(1 + number, dims=-1))
        seconds.append(movement.run()[1])
        engine.fetch(what)
        wrong = what.num_wrong()
        require(wrong == 0, f"update {number}: {wrong} elements in the engine are wrong")
        require(engine.addresses() == addresses, f"update {number} moved live parameters")
    during = free_gib(device)
    own_bytes = engine.device_bytes()
    engine.close()
    movement.close()
    return during, seconds, own_bytes
