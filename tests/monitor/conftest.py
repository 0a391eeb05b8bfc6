"""The tests of what is counted run over links in memory, and through shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import worlds


@pytest.fixture(params=["memory", "shm"])
def links(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of links of all worlds."""
    before, worlds.LINKS = worlds.LINKS, request.param
    yield request.param
    worlds.LINKS = before
