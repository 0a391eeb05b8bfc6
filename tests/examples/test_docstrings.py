"""Docstrings appear whole on the pages that are made from them."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.examples.pages import module_of_docs
from tests.launch.launched import ROOT

MODULES = sorted((ROOT / "kfcomm").rglob("*.py"))
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)


def docstrings(path: Path) -> list[str]:
    """Docstrings of a module, including those of attributes."""
    return [
        inspect.cleandoc(node.value.value)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def cut(docstring: str) -> list[str]:
    """Lines that would be titles: of what is indented below them."""
    pairs = pairwise(docstring.splitlines())
    return [line for line, below in pairs if re.match(r"\w[\w ,-]*: +\S", line) and below.startswith(" ")]


def powers(docstring: str) -> list[str]:
    """Lines with a power that is not written as code."""
    return [line for line in CODE.sub("", docstring).splitlines() if re.search(r"[\w)]\*\*[-\w(]", line)]


def test_no_section_of_a_docstring_is_cut() -> None:
    assert {
        str(path): found for path in MODULES if (found := [one for text in docstrings(path) for one in cut(text)])
    } == {}


def test_powers_are_written_as_code() -> None:
    found = {
        str(path): found for path in MODULES if (found := [one for text in docstrings(path) for one in powers(text)])
    }
    assert found == {}


def test_misread_docstrings_are_found() -> None:
    assert cut("A noun.\n\nCost: one\n    and two.") == ["Cost: one"]
    assert cut("A noun.\n\nCost:\n    One and two.\n\nSource: a paper.") == []
    assert powers("A noun: 2**-11, 2**-8.") == ["A noun: 2**-11, 2**-8."]
    assert powers("A noun: ``2**-11``; ``**options``.") == []


@pytest.fixture(scope="module")
def checks() -> Any:
    return module_of_docs("checks")


@pytest.mark.parametrize(
    ("html", "words"),
    [
        ("<details class='cost'><summary>one <code>x</code> and</summary><p>two.</p></details>", "a section is cut"),
        ("<p>u = 2<strong>-11 for float16, 2</strong>-8</p>", "taken for bold"),
    ],
)
def test_a_page_on_which_something_is_lost_is_found(checks: Any, html: str, words: str) -> None:
    inside = f"<main><p><br><div class='doc doc-contents first'><p>A noun.{html}</div></main>"
    (fault,) = checks.faults(inside)
    assert words in fault
    assert checks.faults(f"<main><div class='doc doc-contents'></div>{html}</main>") == []


def test_a_page_on_which_nothing_is_lost_passes(checks: Any) -> None:
    html = "<details><summary>Cost</summary><p>One, <code>2**-11</code>.</p></details>"
    assert checks.faults(f"<strong>page</strong><div class='doc doc-contents'>{html}</div></p><strong>x</strong>") == []
