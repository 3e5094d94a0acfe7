"""Checks of one process: storages that come and go, copies, and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.bench.gpu.check import Figures, Sizes, free_gib, one_rank, require
from rlhf.bench.logprob import LARGEST_RATIO, naive
from rlhf.bench.rectangles import FORMS, copy_ratio
from rlhf.mcore.logprobs import HeadSettings, linear_logprobs

NUM_PARAMETERS = 8
GIB = 2**30
TOLERANCE = 1e-5
HIDDEN = 256


def check_storages(device: torch.device, sizes: Sizes) -> Figures:
    """Parameters, and gradients that are views of one buffer, give their memory up and get it back.

    Addresses after that are noted, not required: nothing captured reads a trainer's.
    """
    before = free_gib(device)
    count = sizes.storage_bytes // 4
    params = [torch.ones(count, device=device) for _ in range(NUM_PARAMETERS)]
    buffer = torch.ones(NUM_PARAMETERS * count, device=device)
    grads = list(buffer.split(count))
    storages = [t.untyped_storage() for t in (*params, buffer)]
    held = free_gib(device)
    addresses, num_bytes = [s.data_ptr() for s in storages], [s.nbytes() for s in storages]
    for storage in storages:
        storage.resize_(0)
    left = sum(storage.nbytes() for storage in storages)
    require(left == 0, f"{left} bytes are left of {sum(num_bytes)} that were released")
    released = free_gib(device)
    for storage, size in zip(storages, num_bytes, strict=True):
        storage.resize_(size)
    for i, tensor in enumerate((*params, *grads)):
        tensor.fill_(i)
    restored = free_gib(device)
    for i, tensor in enumerate((*params, *buffer.view(NUM_PARAMETERS, count))):
        require(bool((tensor == i).all()), f"view {i} does not show its storage after it came back")
    gib = sum(num_bytes) / GIB
    free = {"before": before, "held": held, "released": released, "restored": restored}
    require_released(free, gib)
    return {
        "gib": gib,
        "free_gib": free,
        "same_addresses": [s.data_ptr() for s in storages] == addresses,
    }


def require_released(free: Mapping[str, float | None], gib: float) -> None:
    """Storages of ``gib`` were allocated, released and taken back between the four moments.

    Raises:
        CheckFailed: free memory did not change by that. On a CPU nothing is known of it.
    """
    for more, less in (("before", "held"), ("released", "held"), ("released", "restored")):
        most, least = free[more], free[less]
        if most is None or least is None:
            continue
        near = abs(most - least - gib) <= 0.05 * gib + 0.03
        text = f"free memory {more} - {less} is {most - least:.3f} GiB, expected {gib:.3f}"
        require(near, text)


def check_copies(device: torch.device, sizes: Sizes) -> Figures:
    """Pack and unpack against plain copies on the device; every element must arrive."""
    out: dict[str, object] = {}
    for form in FORMS:
        what = form(sizes.groups, sizes.width, device)
        out[what.name] = copy_ratio(what, device, sizes.repetitions)
    return out


def check_logprobs(device: torch.device, sizes: Sizes) -> Figures:
    """The head over a TP group of one rank equals torch in float64, gradients included."""
    with one_rank(device):
        settings = HeadSettings(
            temperature=1.0,
            first_column=0,
            num_columns=sizes.vocabulary,
            chunk_rows=1024,
            fp32=True,
            group=dist.group.WORLD,
        )

        def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            rows = torch.arange(len(hidden), device=device)
            return linear_logprobs(hidden, weight, rows, targets, settings)

        ours, our_bytes = _forward_backward(chunked, torch.float32, device, sizes)
    plain, plain_bytes = _forward_backward(naive, torch.float32, device, sizes)
    exact, _ = _forward_backward(_exact, torch.float64, device, sizes)
    figures: dict[str, object] = {
        "tokens": sizes.tokens,
        "vocabulary": sizes.vocabulary,
        "torch_float32_off_by": _differences(plain, exact),
    }
    differences = _differences(ours, exact)
    for name, difference in differences.items():
        require(difference <= TOLERANCE, f"{name} differs by {difference:.2e} > {TOLERANCE:g}")
    if our_bytes is not None and plain_bytes is not None:
        figures["peak_ratio"] = ratio = our_bytes / plain_bytes
        text = f"peak memory is {ratio:.3f} of the naive form's > {LARGEST_RATIO}"
        require(ratio <= LARGEST_RATIO, text)
    return {**figures, "off_by": differences}


def _exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As ``naive``, without a cast to float32."""
    logprobs = torch.log_softmax(hidden @ weight.t(), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def _forward_backward(
    form: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
) -> tuple[dict[str, Tensor], int | None]:
    """Values and gradients in float64 on the host; growth of the device's peak in bytes."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.tokens, HIDDEN, generator=generator)
    weight = torch.randn(sizes.vocabulary, HIDDEN, generator=generator) * 0.05
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator).to(device)
    h, w = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
    h.grad, w.grad = torch.zeros_like(h), torch.zeros_like(w)
    before = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    logprobs, entropy = form(h, w, targets)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    peak = None if before is None else torch.cuda.max_memory_allocated(device) - before
    values = {
        "logprobs": logprobs,
        "entropy": entropy,
        "grad hidden": h.grad,
        "grad weight": w.grad,
    }
    return {name: t.detach().cpu().double() for name, t in values.items()}, peak


def _differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference, relative to the largest element."""
    return {
        name: float((got[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    }
