"""How fast a machine is: the constants of the time model, as a calibration file has them.

The numbers of the GPU set are from data sheets, from measured figures that others publish, or
chosen so that one set predicts the published step times of other systems
(``tests/unit/test_published_times.py``); each field says which. ``rlhf tune`` measures a set on
the machine at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhf.config.faults import ConfigError
from rlhf.config.load import dump_config, load_text
from rlhf.config.schema import Float, Section, Text

Share = Annotated[Float, Field(ge=1e-6, le=1)]
Rate = Annotated[Float, Field(ge=1e-6, le=1e9)]
Seconds = Annotated[Float, Field(ge=0, le=1e6)]
"""Of no machine more or less: what is computed from them stays a number."""


class Speeds(Section):
    """One set of constants. GB are 1e9 bytes, TFLOPs 1e12; a link carries both ways at once."""

    device: Text = "H100"
    """What it is; printed."""
    peak_tflops: Rate = 989.0
    """Dense bf16 matrix products, per second. Data sheet of H100 SXM (without sparsity)."""
    hbm_gbs: Rate = 3350.0
    """Memory bandwidth of the device. Data sheet of H100 SXM."""
    nic_gbs: Rate = 45.0
    """Of one rank to other nodes. 400 Gb/s less headers."""
    nvlink_gbs: Rate = 400.0
    """Of one rank inside its node. NVLink 4 has 450 each way by its data sheet."""
    pcie_gbs: Rate = 25.0
    """Between device and host memory while all devices of a node copy. PCIe 5 x16 has 64 each way;
    eight devices share the memory of two sockets."""
    disk_gbs: Rate = 2.0
    """Of a node, to the storage of checkpoints. Assumed: a shared file system."""

    train_matmul: Share = 0.5
    """Share of the peak that dense products of training reach. MegaScale (arXiv:2402.15627) reports
    0.55 of it for whole steps of dense models."""
    expert_matmul: Share = 0.35
    """The same of grouped products of experts. Chosen: smaller matrices."""
    attention: Share = 0.4
    """The same of attention, forward and backward. FlashAttention-3 (arXiv:2407.08608), figures of
    0.45 to 0.75 for long sequences; packed short ones are slower."""
    prefill_matmul: Share = 0.5
    """The same of products while an engine reads prompts, or decodes large batches."""
    decode_bandwidth: Share = 0.7
    """Share of the memory bandwidth at which decoding reads weights and KV cache, and an optimizer
    its state. Chosen."""
    float32_ratio: Share = 0.06
    """Speed of float32 matrix products over that of bf16 ones. Data sheet of H100 SXM: 67 TFLOPs,
    without TF32."""
    collective: Share = 0.7
    """Share of a link's speed that collectives reach. Chosen."""
    expert_imbalance: Annotated[Float, Field(ge=1, le=1e4)] = 1.3
    """Rows of the expert rank with most over the mean. Chosen."""

    layer_s: Seconds = 1e-3
    """Of a layer's forward pass over a micro-batch, beside its arithmetic: launches and small
    kernels. The backward pass has twice of it. Chosen."""
    expert_layer_s: Seconds = 2e-3
    """More of a layer with experts: routing, sorting, waiting for counts on the host. Chosen."""
    microbatch_s: Seconds = 2e-3
    """Of a micro-batch on a stage: packing it, and a schedule's step. Chosen."""
    update_s: Seconds = 1.0
    """Of an optimizer step, beside its arithmetic: norm of gradients, waiting. Chosen."""
    decode_layer_s: Seconds = 20e-6
    """Of a layer in a step of decoding: its small kernels, in a CUDA graph. Chosen."""
    decode_expert_layer_s: Seconds = 60e-6
    """More of a layer with experts. Chosen."""
    decode_step_s: Seconds = 4e-3
    """Of a step of decoding: scheduler, sampling, detokenising. Chosen."""
    prefill_pass_s: Seconds = 20e-3
    """Of a pass over prompts, beside its layers. Chosen."""
    collective_s: Seconds = 15e-6
    """Of a small collective in a node. Chosen."""
    network_collective_s: Seconds = 60e-6
    """Of a small collective between nodes. Chosen."""
    switch_s: Seconds = 2.0
    """Of all edges of a step together: engines sleep and wake, memory changes hands. Chosen."""
    rollout_s: Seconds = 0.0
    """Of a rollout, beside its passes: requests out, answers in."""
    score_s: Seconds = 0.0
    """Of a phase that scores, beside its micro-batches."""
    reshard_s: Seconds = 0.1
    """Of a reshard, beside its rounds: engines paused, loaders started. Chosen."""
    save_s: Seconds = 1.0
    """Of a checkpoint, beside its bytes. Chosen."""
    answer_pack_s: Seconds = 20e-6
    """Of packing one answer, on every rank. Chosen."""
    answer_reward_s: Seconds = 5e-3
    """Of a rule's reward for one answer, on one core. Chosen."""


CPU = Speeds(
    device="CPU",
    peak_tflops=0.1,
    hbm_gbs=10.0,
    nic_gbs=1.0,
    nvlink_gbs=1.5,
    pcie_gbs=10.0,
    disk_gbs=0.5,
    train_matmul=0.5,
    expert_matmul=0.3,
    attention=0.2,
    prefill_matmul=0.5,
    decode_bandwidth=0.6,
    float32_ratio=1.0,
    collective=0.7,
    expert_imbalance=1.3,
    layer_s=0.5e-3,
    expert_layer_s=1e-3,
    microbatch_s=5e-3,
    update_s=0.05,
    decode_layer_s=100e-6,
    decode_expert_layer_s=200e-6,
    decode_step_s=5e-3,
    prefill_pass_s=5e-3,
    collective_s=200e-6,
    network_collective_s=1e-3,
    switch_s=0.2,
    reshard_s=0.05,
    save_s=0.2,
    answer_pack_s=20e-6,
    answer_reward_s=1e-3,
)
"""Orders of magnitude of a rank with a core or two, for plans before anything is measured."""

H100 = Speeds()


def read_speeds(path: str | Path) -> Speeds:
    """A calibration file, YAML or JSON; keys that it leaves out are those of an H100.

    Raises:
        ConfigError: there is no such file, an unknown key, a value out of range; all at once.
    """
    if not str(path):
        raise ConfigError(["the calibration file's name must not be empty"])
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    return load_text(Speeds, text, str(path))


def write_speeds(speeds: Speeds, path: str | Path, head: str = "") -> None:
    """A calibration file with every key.

    Args:
        head: comment lines without ``#``: where and how the figures were measured.
    """
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    Path(path).write_text(comment + dump_config(speeds), encoding="utf-8")


def changed_speeds(speeds: Speeds, changes: Mapping[str, float | None]) -> Speeds:
    """``speeds`` with some values replaced; None leaves one as it is.

    Raises:
        ConfigError: a value is out of range.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    text = dump_config(speeds)
    return load_text(Speeds, text, "option", [f"{key}={value}" for key, value in given.items()])
