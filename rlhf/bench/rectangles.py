"""Rectangles as reshards have them, moved by the product's own code from one rank to another.

Both ranks are in this process and take turns: the first packs one round into its staging area, the
bytes are put into the other's incoming area, and that one writes them into its parameters. What the
transport takes for the middle step is known, so the rest is packing and unpacking.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf.reshard.execute import Mover
from rlhf.reshard.polling import Poll
from rlhf.reshard.schedule import Message, Placed, RankPlan, Round, Transfer
from rlhf.reshard.transport import Parcel
from rlhf.reshard.windows import Window
from rlhf.reshard.wire import align
from rlhf.rollout import receiver
from rlhf.weights.piece import Box

DTYPE = torch.bfloat16
PARTS = 4
"""Cuts of every parameter on both sides."""
LIMIT_S = 60.0


@dataclass(frozen=True)
class Rectangles:
    """What one rank holds, what the other is to hold, and the transfers between the two."""

    name: str
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]  # zero
    transfers: tuple[Transfer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.transfers)

    def num_wrong(self) -> int:
        """Elements of the targets that are not those of the sources."""
        wrong = 0
        for t in self.transfers:
            wanted = self.sources[t.source_param][_slices(t.source_box)]
            got = self.targets[t.param][_slices(t.box)]
            wrong += int((got != wanted.reshape(got.shape)).sum())
        return wrong


def contiguous_rows(num_groups: int, width: int, device: torch.device) -> Rectangles:
    """Quarters of [2 width, width] parameters, cut along rows: one run of memory each."""
    rows = 2 * width // PARTS
    boxes: list[Box] = [((i * rows, (i + 1) * rows), (0, width)) for i in range(PARTS)]
    return _exchange("contiguous rows", num_groups, (2 * width, width), boxes, device)


def column_slices(num_groups: int, width: int, device: torch.device) -> Rectangles:
    """Quarters of [2 width, width] parameters, cut along columns: width / 4 elements a run."""
    columns = width // PARTS
    boxes: list[Box] = [((0, 2 * width), (i * columns, (i + 1) * columns)) for i in range(PARTS)]
    return _exchange("column slices", num_groups, (2 * width, width), boxes, device)


def expert_slots(num_groups: int, width: int, device: torch.device) -> Rectangles:
    """Single experts [2 width, width] into the slots of a stack of them."""
    shape, box = (2 * width, width), ((0, 2 * width), (0, width))
    sources = {f"s{g}.{e}": _numbered(shape, device) for g in range(num_groups) for e in range(4)}
    targets = {f"t{g}": _empty((PARTS, *shape), device) for g in range(num_groups)}
    transfers = [
        _transfer(f"s{g}.{e}", box, f"t{g}", ((e, e + 1), *box))
        for g in range(num_groups)
        for e in range(PARTS)
    ]
    return Rectangles("expert slots", sources, targets, tuple(transfers))


FORMS: tuple[Callable[[int, int, torch.device], Rectangles], ...] = (
    contiguous_rows,
    column_slices,
    expert_slots,
)


def _exchange(
    name: str, num_groups: int, shape: tuple[int, int], boxes: list[Box], device: torch.device
) -> Rectangles:
    """Part j of target i comes from part i of source j: no part is a whole parameter."""
    count = range(len(boxes))
    names = [(g, i) for g in range(num_groups) for i in count]
    return Rectangles(
        name,
        {f"s{g}.{i}": _numbered(shape, device) for g, i in names},
        {f"t{g}.{i}": _empty(shape, device) for g, i in names},
        tuple(
            _transfer(f"s{g}.{j}", boxes[i], f"t{g}.{i}", boxes[j]) for g, i in names for j in count
        ),
    )


def _numbered(shape: Sequence[int], device: torch.device) -> Tensor:
    """Values that repeat after a prime number of elements."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device) % 251).to(DTYPE).view(tuple(shape))


def _empty(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), dtype=DTYPE, device=device)


def _transfer(source_param: str, source_box: Box, param: str, box: Box) -> Transfer:
    return Transfer(
        tensor=param,
        source=0,
        source_param=source_param,
        source_box=source_box,
        destination=1,
        param=param,
        box=box,
        num_elements=torch.Size([stop - start for start, stop in box]).numel(),
        itemsize=DTYPE.itemsize,
        dtype=None,
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def rank_plans(transfers: Sequence[Transfer]) -> tuple[RankPlan, RankPlan]:
    """Rank 0 sends all of it to rank 1 in one round."""
    parts, at = [], 0
    for transfer in transfers:
        parts.append(Placed(transfer, at, transfer.num_bytes))
        at += align(transfer.num_bytes)
    sent = Round((), (Message(1, 0, at, tuple(parts)),), ())
    received = Round((Message(0, 0, at, tuple(parts)),), (), ())
    size = DTYPE.itemsize
    return RankPlan(0, size, (sent,), 0, at), RankPlan(1, size, (received,), at, 0)


class Loopback:
    """A transport between two movers of one thread; the sender goes first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        """Spent on the wire so far; what the device had still to do before is not counted."""
        self._sent: list[Tensor] = []

    def start(self, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> None:
        begun = now(self.device)
        self._sent += [buffer for buffer, _ in outgoing]
        for buffer, _ in incoming:
            buffer.copy_(self._sent.pop(0))
        self.seconds += now(self.device) - begun

    def wait(self, limit_s: float, poll: Poll) -> None:
        pass

    def close(self) -> None:
        self._sent.clear()


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was told; on a CPU those of this thread alone.

    So other programs do not count, and torch must not compute in threads of its own.
    """
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


class EngineEnd(Protocol):
    """Where a receiver and its model are."""

    call_s: float | None
    """Seconds of the last update's loader call if it waited for nothing; None: not known."""

    def begin(self, message: Mapping[str, Any]) -> None:
        """Start a loader call."""
        ...

    def poll(self) -> None:
        """Called by the mover while it waits."""
        ...

    def end(self) -> None:
        """Wait until the loader call has returned."""
        ...


class InlineEngine:
    """The receiver in the mover's own thread: it takes its turn when the mover waits for it.

    So an update must have one round, which is posted and closed by then. Two threads would wait
    for one another's interpreter lock, which an engine's process does not.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """``tensors``: the live parameters by name."""
        self.call_s: float | None = None
        self._model = module_of(tensors)
        self._update: Mapping[str, Any] | None = None

    def begin(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "update":
            self._update = message
        else:
            self._call(message)

    def poll(self) -> None:
        if self._update is not None:
            message, self._update = self._update, None
            self.call_s = self._call(message)

    def end(self) -> None:
        pass

    def _call(self, message: Mapping[str, Any]) -> float:
        begun = time.thread_time()
        receiver.load(self._model, [(json.dumps(message), torch.empty(0))])
        return time.thread_time() - begun


class Movement:
    """Two movers over the rectangles; behind the second an engine's receiver, or tensors."""

    def __init__(
        self, what: Rectangles, device: torch.device, engine: EngineEnd | None = None
    ) -> None:
        """``engine``: whose parameters are filled; None: the targets, without a receiver."""
        self._device = device
        self._engine = engine
        self._wire = Loopback(device)
        sent, received = rank_plans(what.transfers)
        self._sender = Mover(sent, what.sources, self._wire, {}, dtype=DTYPE, limit_s=LIMIT_S)
        target = what.targets if engine is None else Window(received.incoming_area_bytes, device)
        self._receiving = Mover(received, {}, self._wire, target, dtype=DTYPE, limit_s=LIMIT_S)
        if engine is not None:
            engine.begin(self._receiving.open_message())
            self._receiving.window.wait_opened(LIMIT_S, _no_poll)
            engine.end()

    def run(self) -> tuple[float, float]:
        """Move everything once; seconds of pack and of unpack, without those of the wire."""
        pack_s, unpack_s = self._timed(self._pack), self._timed(self._unpack)
        call_s = None if self._engine is None else self._engine.call_s
        return pack_s, unpack_s if call_s is None else call_s

    def close(self) -> None:
        """Give the window away."""
        if self._engine is not None:
            self._receiving.window.close()

    def _pack(self) -> None:
        self._sender.run(_no_poll)

    def _unpack(self) -> None:
        if self._engine is None:
            self._receiving.run(_no_poll)
            return
        self._engine.begin(self._receiving.update_message())
        self._receiving.run(self._engine.poll)
        self._engine.end()

    def _timed(self, work: Callable[[], None]) -> float:
        begun, on_wire = now(self._device), self._wire.seconds
        work()
        return now(self._device) - begun - (self._wire.seconds - on_wire)


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module whose parameters are the tensors; a dot in a name is a module in a module."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def _no_poll() -> None:
    """Nothing to look after while waiting."""


class PlainCopies:
    """As many bytes through a buffer of the same size: two contiguous copies."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._from, self._by, self._to = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(3)
        )

    def run(self) -> tuple[float, float]:
        """Seconds of either copy."""
        return self._timed(self._by, self._from), self._timed(self._to, self._by)

    def _timed(self, target: Tensor, source: Tensor) -> float:
        begun = now(self._device)
        target.copy_(source)
        return now(self._device) - begun


def copy_ratio(
    what: Rectangles, device: torch.device, repetitions: int, engine: EngineEnd | None = None
) -> dict[str, float]:
    """Speed of pack and unpack over that of two plain copies; each is the best of its kind.

    The two forms take turns, after one of each that is not counted.

    Raises:
        RuntimeError: not all elements arrived.
    """
    movement = Movement(what, device, engine)
    plain = PlainCopies(what.num_bytes, device)
    runs = [(*movement.run(), *plain.run()) for _ in range(repetitions + 1)]
    movement.close()
    wrong = what.num_wrong()
    if wrong:
        raise RuntimeError(f"{what.name}: {wrong} elements are not those that were sent")
    pack_s, unpack_s, *plain_s = (min(column) for column in zip(*runs[1:], strict=True))
    gigabytes = what.num_bytes / 1e9
    return {
        "bytes": what.num_bytes,
        "transfers": len(what.transfers),
        "pack_gb_per_s": gigabytes / pack_s,
        "unpack_gb_per_s": gigabytes / unpack_s,
        "plain_gb_per_s": 2 * gigabytes / sum(plain_s),
        "ratio": sum(plain_s) / (pack_s + unpack_s),
    }
