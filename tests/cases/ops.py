"""Each abstract operation of the cases, mapped to the product's own code: glue only.

``OPS[op](input)`` returns a dict with the keys of ``expected``, or raises. ``WAITING`` says what
each operation without a mapping waits for.
"""

from __future__ import annotations

from tests.cases import (
    configuration,
    context,
    data,
    experts,
    fused,
    launching,
    logprobs,
    losses,
    memory,
    runs,
    weights,
)
from tests.cases.case import Op

OPS: dict[str, Op] = {
    **configuration.OPS,
    **context.OPS,
    **data.OPS,
    **experts.OPS,
    **fused.OPS,
    **launching.OPS,
    **logprobs.OPS,
    **losses.OPS,
    **memory.OPS,
    **runs.OPS,
    **weights.OPS,
}

BEHAVIOUR: dict[tuple[str, str], str] = {
    (
        "cp_invariance",
        "gradient_scale_vs_cp1",
    ): "tests/dist/test_parity_context.py::test_losses_and_gradient_norms_equal_one_rank",
    (
        "ipc_refcount",
        "counter",
    ): "tests/unit/test_reshard_window.py::"
    "test_a_window_is_mapped_once_at_each_end_and_gone_when_both_have_let_go",
    (
        "ipc_refcount",
        "reclaimable",
    ): "tests/unit/test_reshard_window.py::"
    "test_a_window_is_mapped_once_at_each_end_and_gone_when_both_have_let_go",
    (
        "kv_cache_validity",
        "cached_tokens_for_B",
    ): "tests/e2e/test_engine_weights.py::test_no_cached_prefix_outlives_its_weights",
    (
        "kv_cache_validity",
        "reuse_allowed",
    ): "tests/e2e/test_engine_weights.py::test_no_cached_prefix_outlives_its_weights",
    (
        "optimizer_reshard",
        "any_of",
    ): "tests/dist/test_parity_checkpoint.py::test_another_layout_continues_equal",
    (
        "stop_consensus",
        "at_step",
    ): "tests/e2e/test_failures.py::test_a_signal_saves_and_leaves_nothing",
    (
        "truncated_logprob",
        "kept",
    ): "tests/unit/test_config_check.py::test_impossible_combinations_are_refused_by_name",
    (
        "truncated_logprob",
        "renormalised_logprob",
    ): "tests/unit/test_config_check.py::test_impossible_combinations_are_refused_by_name",
}
"""(operation, expected key) that no function answers -> the test of the behaviour that proves it.

A truncated distribution is refused, so nothing is kept of one and nothing is renormalised.
"""

WAITING: dict[str, tuple[str, ...]] = {
    "rewards for mathematics": ("math_reward", "boxed_extract", "gsm8k_extract"),
    "more algorithms: leave-one-out, length penalty": ("rloo_advantage", "overlong_penalty"),
    "mixture-of-experts families and the layouts of large models": (
        "replayed_expert_weights",
        "route_padding",
    ),
}
"""What has to be built -> the operations that it will map."""
