"""A folder appears complete or not at all."""

from __future__ import annotations

import pytest

from rlhf.weights.whole_folder import whole_folder


def test_a_failure_leaves_nothing_and_the_next_attempt_starts_empty(tmp_path):
    target = tmp_path / "a" / "model"
    with pytest.raises(OSError, match="full"), whole_folder(target) as writing:
        (writing / "half").touch()
        raise OSError("full")
    assert list(target.parent.iterdir()) == []
    (target.parent / "model.writing" / "of a killed one").mkdir(parents=True)
    with whole_folder(target) as writing:
        assert list(writing.iterdir()) == []
        (writing / "whole").touch()
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["whole"]
    assert list(target.parent.iterdir()) == [target]
