"""Stand-ins that let the real megatron-core run on ranks without a GPU, over gloo.

:func:`install` is called once by ``rlhf.builder``, before anything builds a model; it does nothing
when a GPU is present. What is replaced, and why, stands in the modules: ``runtime`` (torch.cuda
calls and ``device="cuda"`` literals), ``rng`` (the CUDA generator), ``collectives`` (what gloo
lacks), ``dispatch`` (sizes of what experts exchange), ``adam`` (type-name checks of the optimizers;
FusedAdam, also used on a GPU that has neither transformer-engine nor apex).
"""

from __future__ import annotations


def install() -> bool:
    """Replace what megatron-core needs of CUDA; repeated calls do nothing.

    Affects the whole process: ``torch.cuda`` answers for the CPU, ``device="cuda"`` means the CPU,
    and torch.compile is off. Returns whether the stand-ins are in place.
    """
    import torch

    from rlhf.platform.megatron_cpu import runtime

    if runtime.is_installed():
        return True
    if torch.cuda.is_available():
        return False
    runtime.quiet_warnings()
    from rlhf.platform.megatron_cpu import adam, collectives, dispatch, rng, weight_gradient

    runtime.keep_freed_memory()
    runtime.disable_compilation()
    runtime.replace_literal_cuda()
    runtime.replace_cuda_calls()
    rng.replace_cuda_generator()
    adam.accept_cpu_tensor_types()
    weight_gradient.provide_fused_weight_gradient()
    collectives.complete_gloo()
    dispatch.provide_split_sizes()
    return True
