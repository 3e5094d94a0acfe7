"""docs/add-a-model.md: its code stands in the files that it names, its sessions run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"```python\n# (\S+)\n(.*?)```", DOC, re.DOTALL)
SESSIONS = re.findall(r"```pycon\n(.*?)```", DOC, re.DOTALL)


def test_all_code_of_the_page_is_checked():
    assert len(QUOTED) + len(SESSIONS) == DOC.count("```") // 2


@pytest.mark.parametrize(("file", "code"), QUOTED)
def test_quoted_code_stands_in_its_file(file, code):
    assert f"\n{code}" in (ROOT / file).read_text(encoding="utf-8")


def test_sessions_run_as_they_stand(tmp_path):
    """One after the other, as a reader would type them."""
    variables = {"folder": make_tiny(tmp_path / "glm", "glm4_moe")}
    examples = doctest.DocTestParser().get_doctest(
        "\n".join(SESSIONS), variables, "add-a-model.md", None, 0
    )
    said = []
    assert len(examples.examples) > 8
    doctest.DocTestRunner().run(examples, out=said.append)
    assert not said, "".join(said)


def test_files_that_the_page_names_exist():
    names = set(re.findall(r"(?:rlhf|tests)/[\w/]+\.py", DOC))
    assert len(names) > 6
    assert all((ROOT / name).is_file() for name in names)
