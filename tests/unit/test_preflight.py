"""A loop is looked for before any rank is started."""

from __future__ import annotations

import pytest

from rlhf.preflight import check_loop

LOOP = """
import megatron_of_another_machine
from elsewhere import borrowed

def train(run): ...

if True:
    other = train
"""


def test_a_loop_is_found_without_being_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(LOOP)
    for name in ("train", "borrowed", "other"):
        check_loop(f"{file}:{name}")
    check_loop("rlhf.loop:train")
    file.write_text("from elsewhere import *")
    check_loop(f"{file}:anything")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mine.py", "write FILE.py:FUNCTION"),
        ("none.py:train", "no file .*none.py"),
        ("rlhf.lop:train", "no module rlhf.lop"),
        ("no_such_package.loop:train", "no module no_such_package.loop"),
        ("rlhf.loop:tran", "loop.py defines no function 'tran'"),
        ("mine.py:tran", "mine.py defines no function 'tran'"),
        ("torn.py:train", "torn.py is not Python"),
    ],
)
def test_a_loop_that_is_not_there_is_named(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOOP)
    (tmp_path / "torn.py").write_text("def train(")
    with pytest.raises(ValueError, match=f"--loop {spec}: .*{words}"):
        check_loop(spec)
