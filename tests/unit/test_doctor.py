"""What the doctor says of what it finds."""

from rlhf.doctor import Finding, Level, Report, allocators, apex, diagnose, transformer_engine


def test_the_other_apex_is_a_problem_and_says_what_to_do():
    finding = apex("other", gpu=True)
    assert finding.level is Level.PROBLEM
    assert "pip uninstall apex" in finding.text
    assert "NVIDIA/apex" in finding.text
    assert apex("nvidia", gpu=True).level is Level.OK
    assert apex("none", gpu=False).level is Level.NOTE


def test_a_wrong_apex_on_the_path_is_seen(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    report = diagnose({})
    assert not report.can_train
    assert "PROBLEM" in report.as_text()


def test_missing_pieces_name_their_cost():
    assert "fp8" in transformer_engine(None, gpu=True).text
    assert allocators({}, gpu=True)[0].level is Level.NOTE
    assert allocators({}, gpu=False) == []
    assert Report((Finding("x", Level.NOTE, "y"),)).can_train


def test_this_environment_can_train():
    report = diagnose({})
    assert report.can_train, report.as_text()
    assert {"torch", "megatron-core", "sglang"} <= {f.topic for f in report.findings}
