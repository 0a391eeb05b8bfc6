"""The word check itself."""

from __future__ import annotations

import pytest

from tests.plain_words import in_markdown, in_python, over_of


@pytest.mark.parametrize(
    "text",
    [
        '"""What a rank tells its launcher."""',
        'def f():\n    """See ``Memory``."""',
        "def test_what_is_wrong_is_refused(): ...",
        'raise ValueError("9 is no size that it takes")',
        '"""Heartbeats.\n\n    Whoever does not answer is lost."""',
    ],
)
def test_prose_to_rewrite_is_found(text: str) -> None:
    assert len(list(in_python(text))) == 1


def test_code_and_plain_prose_pass() -> None:
    assert not list(in_python('"""Return the ranks of ``comm.births`` that answer."""'))
    assert not list(in_markdown("# Ranks\n```\nwhoever\n```\nThe rank `births` is lost.\n"))


def test_counts_may_only_go_down() -> None:
    permitted = {"a": 2, "b": 1}
    assert not over_of({"a": 1, "b": 1}, permitted)
    assert over_of({"a": 3, "b": 0}, permitted) == {"a": 3}
    assert not over_of({"a": 0, "moved": 2}, permitted)
    assert over_of({"a": 2, "moved": 2}, permitted) == {"moved": 2}
