"""These tests run over links in memory, and through shared memory among three ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import worlds

SHARED_SIZE = 3
"""What links do does not depend on how many there are; the graphs of larger worlds are the same in memory."""


@pytest.fixture(scope="module", params=["memory", "shm"], autouse=True)
def links(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kind of links of all worlds."""
    before, worlds.LINKS = worlds.LINKS, request.param
    yield
    worlds.LINKS = before


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves other sizes over shared memory out, unless a test names them."""
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("links") != "shm" or item.path.parent.name != "conformance":
        return False
    if item.path.name == "test_strategies.py":  # its worlds are chosen there
        return False
    return callspec.params.get("size", SHARED_SIZE) != SHARED_SIZE
