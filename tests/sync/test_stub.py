"""The stub of the derived verbs is that of the verbs."""

from __future__ import annotations

from tests.sync import stub


def test_stub_has_the_signatures_of_the_asyncio_verbs() -> None:
    assert stub.FILE.read_text() == stub.text(), "run: python -m tests.sync.stub"
