"""Whether this process has a GPU: asked once, before torch is imported, and answered for all."""

from __future__ import annotations

import os
from collections.abc import Mapping

DRIVER = "/dev/nvidiactl"


def has_gpu(environ: Mapping[str, str] = os.environ, driver: str = DRIVER) -> bool:
    """True where NVIDIA's driver offers devices and CUDA_VISIBLE_DEVICES does not hide them all.

    Opens nothing. A list of devices ends at the first invalid number, so one that begins with -1 is
    empty, as is the empty text.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
    return os.path.exists(driver) and not hidden


def check_torch(expected: bool, available: bool, version: str) -> None:
    """The trainer's torch must see what the engines were started for.

    Args:
        expected: :func:`has_gpu`.
        available: ``torch.cuda.is_available()``.
        version: of torch, which names its build.

    Raises:
        RuntimeError: with both facts and what to do.
    """
    if expected == available:
        return
    if expected:
        facts = f"{DRIVER} exists and CUDA_VISIBLE_DEVICES does not hide it"
        advice = "install a CUDA build of torch that fits the driver (`make install FLAVOUR=gpu`)"
    else:
        facts = f"{DRIVER} does not exist or CUDA_VISIBLE_DEVICES hides all devices"
        advice = "give this process the driver's device files"
    raise RuntimeError(
        f"{facts}, but torch {version} has cuda.is_available()={available}; {advice}, or set "
        "CUDA_VISIBLE_DEVICES=-1 to run on the CPU"
    )
