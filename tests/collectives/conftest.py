"""Every test of this folder runs over links in memory and through shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import worlds


@pytest.fixture(scope="module", params=["memory", "shm"], autouse=True)
def links(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kind of links of all worlds."""
    before, worlds.LINKS = worlds.LINKS, request.param
    yield
    worlds.LINKS = before
