"""A process that stands where SGLang's scheduler stands: a model, and ``receiver.load`` calls.

The receiver, the window and its words are the real ones; only the model is a bare module with the
engine's parameter names.
"""

from __future__ import annotations

import json
import multiprocessing as mp
from collections.abc import Mapping, Sequence
from typing import Any


def _serve(pipe: Any) -> None:
    import torch

    from rlhf.rollout import receiver
    from tests.helpers.shards import dummy_engine

    torch.set_num_threads(1)
    model: Any = None
    while True:
        try:
            kind, argument = pipe.recv()
        except EOFError:
            return
        if kind == "model":
            shapes, dtype, own = argument
            dtypes = {name: getattr(torch, given) for name, given in own.items()}
            model = dummy_engine(shapes, getattr(torch, dtype), dtypes)
            pipe.send("made")
        elif kind == "load":
            receiver.load(model, [(json.dumps(argument), torch.empty(0))])
            pipe.send("returned")
        elif kind == "weights":
            pipe.send({n: p.detach().numpy() for n, p in model.named_parameters()})
        elif kind == "pointers":
            pipe.send({n: p.data_ptr() for n, p in model.named_parameters()})
        elif kind == "cut":
            name, rows = argument
            parameter = model.get_parameter(name)
            parameter.data = parameter.data[:rows].clone()
            pipe.send("cut")


class EngineProcess:
    """One engine rank."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def make_model(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: str = "float32",
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """A new model of NaN; ``dtype`` must be one that numpy knows, to read weights back.

        Args:
            dtypes: of parameters that are not of ``dtype``.
        """
        assert self.ask("model", (dict(shapes), dtype, dict(dtypes or {}))) == "made"

    def begin(self, message: Mapping[str, Any]) -> None:
        """Call the loader; returns at once, as an update needs."""
        self._pipe.send(("load", dict(message)))

    def end(self, timeout_s: float = 30.0) -> None:
        """Wait for the loader call to return."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the loader did not return in {timeout_s} s")
        assert self._pipe.recv() == "returned"

    def load(self, message: Mapping[str, Any]) -> None:
        self.begin(message)
        self.end()

    def ask(self, kind: str, argument: Any = None) -> Any:
        """``weights``: name -> array; ``pointers``: name -> address; ``cut``: (name, rows)."""
        self._pipe.send((kind, argument))
        if not self._pipe.poll(30):
            raise TimeoutError(f"no answer to {kind}")
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self.kill()
