"""The bench that moves weights by plan and by a full gather, small."""

from __future__ import annotations

from rlhf.bench.reshard_gloo import Settings, gates_of, measure


def test_both_ways_fill_the_engine_and_the_plan_moves_the_least():
    figures = measure(
        Settings(
            hidden=256,
            layers=3,
            experts=8,
            area_bytes=1 << 18,
            bucket_bytes=1 << 17,
            repetitions=1,
        )
    )
    assert figures["wrong"] == 0
    assert figures["plan_bytes"] == figures["bound_bytes"]
    assert figures["rounds"] > 4
    assert {gate.name for gate in gates_of(figures) if not gate.holds} <= {
        "full gather bytes / plan bytes",  # three layers are not cut evenly over two stages
        "full gather seconds / plan seconds",  # nor are times of small tensors worth anything
    }
