"""The engine's end of a reshard: writes rounds from the shared window into live parameters.

In a restore it reads: live parameters into rounds of the window.

Runs inside SGLang's scheduler process as its custom weight loader (``rlhf.rollout.receiver.load``):
torch, the standard library and the few modules of this package that need no more. One loader call
is one update: it loops over the rounds until the rank ends it. An exception here would kill the
engine and all around it, so nothing is raised: errors go through the window, where the rank reads
them.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import threading
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.platform.pages import release_pages
from rlhf.reshard.checksum import Sums
from rlhf.reshard.wire import HEAD_BYTES, TEXT_AT, TEXT_BYTES, End, Word
from rlhf.rollout.receiver_reads import check_reads, read_dtype

NAP_S = 1e-4
RELEASED_BYTES = 2**18
"""Tensors from this size on give up their pages in a sleep that frees."""
ATTRIBUTE = "_reshard_receiver"
WORKER = "_reshard_worker"
DERIVED = ("cos_sin_cache", "inv_freq", ".k_scale", ".v_scale")
"""What follows from the configuration and never moves; the scales are those of a KV cache, which
attention has in a model of fp8 weights."""
DERIVED_WEIGHTS = ("w_kc", "w_vc")
"""The two halves of a latent attention's ``kv_b_proj``, as its absorbed form takes them."""

Slice = tuple[str, tuple[slice, ...], Tensor]
"""Parameter, rectangle in it, the area's bytes as a contiguous tensor."""
ALL_ROUNDS = 2**62
"""More rounds than a movement has."""

logger = logging.getLogger(__name__)


def load(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Obey the messages (JSON in the names, see ``wire``). Never raises."""
    for text, _ in named_tensors:
        try:
            message = json.loads(text)
            if "stages" in message:
                _obey_as_stage(model, message["stages"][model.pp_group.rank_in_group])
            else:
                _obey(model, message)
        except BaseException:  # would kill the engine and its parent
            logger.exception("reshard receiver: no window to report this through: %.200s", text)


def _obey_as_stage(model: nn.Module, message: dict[str, Any]) -> None:
    """A stage gets its call when the stage before it has returned from the same one.

    The ranks drive an update through all stages together, so it works beside the scheduler until
    the next call joins it.
    """
    if message["op"] in ("update", "read"):
        worker = threading.Thread(target=_update_aside, args=(model, message), daemon=True)
        setattr(model, WORKER, worker)
        worker.start()
    elif message["op"] == "join":
        begun: threading.Thread | None = getattr(model, WORKER, None)
        if begun is not None:
            begun.join()
    else:
        _obey(model, message)


def _update_aside(model: nn.Module, message: dict[str, Any]) -> None:
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    _obey(model, message)


def _obey(model: nn.Module, message: dict[str, Any]) -> None:
    if message["op"] == "open":
        # On the model, not in this module: a draft model in the same process has its own.
        setattr(model, ATTRIBUTE, _Receiver(model, message))
    if message["op"] == "sleep":
        _sleep(model, free=bool(message["free"]))
        return
    receiver: _Receiver = getattr(model, ATTRIBUTE)
    receiver.obey(message)


class _Receiver:
    """One model's window."""

    def __init__(self, model: nn.Module, message: dict[str, Any]) -> None:
        self._model: Any = model  # of a class of SGLang
        self._memory = torch.from_file(
            message["path"], shared=True, size=message["bytes"], dtype=torch.uint8
        )
        self._words = self._memory[: len(Word) * 8].view(torch.int64)
        self._area_bytes = int(message["area_bytes"])
        self._areas = self._memory[HEAD_BYTES : message["sums_at"]]
        self._sums_table = self._memory[message["sums_at"] :].view(torch.int64)
        self._sums: Sums | None = None
        self._writes: list[list[Slice]] = []
        self._reads: list[list[Slice]] = []
        self._refusal = "the window was never opened"

    def obey(self, message: dict[str, Any]) -> None:
        """Carry out one message; errors end in the window."""
        op = message["op"]
        try:
            {
                "open": self._open,
                "update": self._update,
                "read": self._read,
                "table": self._table,
            }[op](message)
        except BaseException:  # noqa: BLE001  goes to the rank, which raises it
            self._report(traceback.format_exc())
        finally:
            if op in ("update", "read"):
                self._words[Word.SEQUENCE] = int(message["sequence"])
            elif op == "open":
                # A fresh receiver is inside no update, whatever the window went through before.
                self._words[Word.SEQUENCE] = self._words[Word.START]

    def _open(self, message: dict[str, Any]) -> None:
        """Map the areas and check every write, and read, against the live parameters."""
        rounds, back = message["rounds"], message["back"]
        self._words[Word.ERROR] = 0
        self._refusal = "the window's opening failed"
        dtypes = defaultdict(
            lambda: getattr(torch, rounds["dtype"]),
            {param: getattr(torch, name) for param, name in rounds["dtypes"].items()},
        )
        if rounds["device_handle"] is not None:
            self._areas = pickle.loads(base64.b64decode(rounds["device_handle"]))
        live = _live(self._model)
        for param in rounds["padding"]:
            live.pop(param)
        try:
            _check(live, rounds["writes"], dtypes)
            if back is not None:
                check_reads(live, back["reads"], back["dtype"])
        except ValueError as error:
            self._refusal = str(error)
            raise
        self._writes = [
            [
                self._slice(number, param, box, offset, dtypes[param])
                for param, box, offset in writes
            ]
            for number, writes in enumerate(rounds["writes"])
        ]
        self._reads = [
            [
                self._slice(number, param, box, offset, read_dtype(dtype, back["dtype"]))
                for param, box, offset, dtype in reads
            ]
            for number, reads in enumerate(back["reads"] if back is not None else [])
        ]
        self._refusal = ""

    def _slice(
        self, number: int, param: str, box: list[list[int]], offset: int, dtype: torch.dtype
    ) -> Slice:
        shape = [stop - start for start, stop in box]
        begin = number % 2 * self._area_bytes + offset
        size = torch.Size(shape).numel() * dtype.itemsize
        values = self._areas[begin : begin + size].view(dtype).view(shape)
        return param, tuple(slice(start, stop) for start, stop in box), values

    def _update(self, message: dict[str, Any]) -> None:
        """Write rounds as they are posted, until the rank ends the update."""
        device = self._areas.device
        self._sums = Sums(self._sums_table, device) if message.get("verify") else None
        if not self._run_rounds(message, self._write_round, len(self._writes), ahead=1):
            return
        if self._sums is not None:
            self._sums.publish()
        if hasattr(self._model, "post_load_weights"):
            with torch.no_grad():
                self._model.post_load_weights()
        self._synchronize()

    def _read(self, message: dict[str, Any]) -> None:
        """Read rounds as areas come free, until the rank ends the update."""
        self._run_rounds(message, self._read_round, len(self._reads), ahead=-1)

    def _run_rounds(
        self,
        message: dict[str, Any],
        run: Callable[[dict[str, Tensor], int], int],
        num_rounds: int,
        ahead: int,
    ) -> bool:
        """``run`` each round r once the rank has posted r + ``ahead``; False if it gave up."""
        sequence, limit_s = int(message["sequence"]), float(message["limit_s"])
        words, deadline, parent = self._words, time.monotonic() + limit_s, os.getppid()

        def wait(word: Word, value: int, what: str) -> bool:
            """True when ``word`` has reached ``value``, False when no more rounds come."""
            while int(words[word]) < value:
                if word is Word.POSTED and int(words[Word.END]) and int(words[word]) < value:
                    return False
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {limit_s:g} s for the rank {what}")
                if os.getppid() != parent:
                    raise RuntimeError(f"the engine lost its parent while waiting {what}")
                time.sleep(NAP_S)
            return True

        wait(Word.START, sequence, f"to begin update {sequence}")
        if self._refusal:
            raise RuntimeError(self._refusal)
        live = _live(self._model)
        done = 0
        while wait(
            Word.POSTED,
            done + ahead if ahead > 0 or done < num_rounds else ALL_ROUNDS,
            f"to post round {done}",
        ):
            words[Word.BYTES] += run(live, done)
            done += 1
            words[Word.DONE] = done
            deadline = time.monotonic() + limit_s
        if int(words[Word.END]) == End.ABANDON:
            return False
        if done != num_rounds:
            raise RuntimeError(f"the rank ended the update after {done} of {num_rounds} rounds")
        return True

    def _write_round(self, live: dict[str, Tensor], number: int) -> int:
        """Copy a round into the parameters, sum up what they hold then; the bytes written."""

        def write(part: Tensor, values: Tensor) -> None:
            part.copy_(values)
            if self._sums is not None:
                self._sums.add(part)

        return self._copy(self._writes, number, write, live)

    def _read_round(self, live: dict[str, Tensor], number: int) -> int:
        """Copy a round out of the parameters, cast to what is trained; the bytes read."""
        return self._copy(self._reads, number, lambda part, values: values.copy_(part), live)

    def _copy(
        self,
        rounds: list[list[Slice]],
        number: int,
        copy: Callable[[Tensor, Tensor], object],
        live: dict[str, Tensor],
    ) -> int:
        num_bytes = 0
        for param, box, values in rounds[number]:
            try:
                copy(live[param].data[box], values)
            except Exception as error:
                raise RuntimeError(f"round {number}, parameter {param}{box}: {error}") from error
            num_bytes += values.numel() * values.element_size()
        self._synchronize()
        return num_bytes

    def _synchronize(self) -> None:
        """The area may be reused, and the engine may run, only when the copies have ended."""
        if self._areas.is_cuda:
            torch.cuda.current_stream(self._areas.device).synchronize()

    def _table(self, message: dict[str, Any]) -> None:
        """Reply with name, shape, dtype and address of all live parameters."""
        table = {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "data_ptr": tensor.data_ptr(),
                "contiguous": tensor.is_contiguous(),
            }
            for name, tensor in _live(self._model).items()
        }
        data = zlib.compress(json.dumps(table).encode())
        if len(data) > TEXT_BYTES:
            raise ValueError(f"a reply of {len(data)} bytes does not fit {TEXT_BYTES}")
        self._put_text(data)
        self._words[Word.REPLY] = len(data)

    def _report(self, text: str) -> None:
        """The end of ``text`` as this update's error."""
        data = text.encode()[-TEXT_BYTES:]
        self._put_text(data)
        self._words[Word.ERROR] = len(data)

    def _put_text(self, data: bytes) -> None:
        self._memory[TEXT_AT : TEXT_AT + len(data)] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )


def _live(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint feeds; tied ones once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t for n, t in named.items() if not n.endswith(DERIVED)}


def _derived(model: nn.Module) -> list[Tensor]:
    """What the model computes from its weights after they were loaded, and keeps beside them."""
    found = (getattr(module, name, None) for module in model.modules() for name in DERIVED_WEIGHTS)
    return [value for value in found if isinstance(value, Tensor)]


def _sleep(model: nn.Module, *, free: bool) -> None:
    """NaN into weights in host memory, which SGLang's release does not touch.

    So a request before the next update shows, and so does what that update would leave out. With
    ``free`` the large ones give up their memory instead and are zero until they are written; every
    norm is small.
    """
    for tensor in (*_live(model).values(), *_derived(model)):
        if tensor.device.type != "cpu" or not tensor.is_floating_point():
            continue
        if free and tensor.nbytes >= RELEASED_BYTES and tensor.is_contiguous():
            release_pages(tensor.data)
        else:
            tensor.data.fill_(float("nan"))


def _check(
    live: dict[str, Tensor], rounds: list[list[Any]], dtypes: Mapping[str, torch.dtype]
) -> None:
    """
    Raises:
        ValueError: a parameter is missing, unplanned, of another dtype, or not fully written
            (rows of vocabulary padding at its end excepted); all faults at once.
    """
    written: dict[str, int] = {}
    rows: dict[str, int] = {}
    faults = []
    for param, box, _ in (write for writes in rounds for write in writes):
        if param not in live:
            faults.append(f"the model has no parameter {param}")
            continue
        shape = list(live[param].shape)
        if len(box) != len(shape) or any(b[1] > n for b, n in zip(box, shape, strict=True)):
            faults.append(f"{param} has shape {shape}, the plan writes {box}")
        written[param] = written.get(param, 0) + torch.Size(b - a for a, b in box).numel()
        rows[param] = max(rows.get(param, 0), box[0][1])
    for param, tensor in live.items():
        if param not in written:
            faults.append(f"the plan does not write {param}")
        elif tensor.dtype != dtypes[param]:
            faults.append(f"{param} is {tensor.dtype}, the plan writes {dtypes[param]}")
        elif written[param] != rows[param] * (tensor.numel() // tensor.shape[0]):
            faults.append(
                f"{param} has {tensor.numel()} elements, the plan writes {written[param]}"
            )
    if faults:
        shown = sorted(set(faults))
        more = f"; and {len(shown) - 12} more" if len(shown) > 12 else ""
        raise ValueError("engine and plan differ: " + "; ".join(shown[:12]) + more)
