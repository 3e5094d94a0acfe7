"""``make bench-logprob``: peak memory of log-probabilities and entropy against the naive form.

Forward and backward of 4096 tokens over a vocabulary of 32k, each in a process of its own; the
figure is the growth of the process's peak resident memory (of the device's, on a GPU).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.bench.result import Gate, finish
from rlhf.mcore.logprobs import HeadSettings, linear_logprobs

TOKENS, VOCABULARY, HIDDEN = 4096, 32768, 256
LARGEST_RATIO = 0.15
"""Of peak memory to that of the naive form."""


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes first: all logits at once."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float(), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The product's head with its default settings."""
    settings = HeadSettings(
        temperature=1.0, first_column=0, num_columns=VOCABULARY, chunk_rows=1024, fp32=True
    )
    rows = torch.arange(len(hidden), device=hidden.device)
    return linear_logprobs(hidden, weight, rows, targets, settings)


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "naive": naive,
    "chunked": chunked,
}


def measure(form: str) -> dict[str, float]:
    """Bytes and seconds of one forward and backward in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.05).to(device)
    weight.requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator).to(device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    chunked(hidden[:8], weight, targets[:8])[0].sum().backward()  # libraries loaded, pools made
    before, began = _peak_bytes(device), time.perf_counter()
    logprobs, entropy = FORMS[form](hidden, weight, targets)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return {
        "bytes": _peak_bytes(device) - before,
        "seconds": time.perf_counter() - began,
        "checksum": float(logprobs.sum()),
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, help="measure one form in this process")
    args = parser.parse_args()
    if args.form:
        print(json.dumps(measure(args.form)))
        return 0
    results = {}
    for form in FORMS:
        command = [sys.executable, "-m", "rlhf.bench.logprob", "--form", form]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[form] = json.loads(done.stdout)
    ratio = results["chunked"]["bytes"] / results["naive"]["bytes"]
    off = abs(results["chunked"]["checksum"] / results["naive"]["checksum"] - 1)
    return finish(
        "logprob",
        {"tokens": TOKENS, "vocabulary": VOCABULARY, "hidden": HIDDEN, **results},
        [
            Gate("peak memory / naive form", ratio, "<=", LARGEST_RATIO),
            Gate("relative difference of the sum", off, "<=", 1e-5),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
