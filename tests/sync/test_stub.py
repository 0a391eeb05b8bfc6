"""The stubs of derived blocking methods are those of the asyncio ones."""

from __future__ import annotations

from tests.sync import stub


def test_stub_has_the_signatures_of_the_asyncio_verbs() -> None:
    for file, content in stub.texts().items():
        assert file.read_text() == content, "run: python -m tests.sync.stub"
