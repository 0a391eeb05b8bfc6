"""The pytest plugin: worlds for the tests of programs that use kfcomm.

::

    @pytest.mark.kfcomm(ranks=4, transport="shm")
    async def test_mean(kfcomm_world):
        assert await kfcomm_world.run(mean, 3.0) == [3.0] * 4

Options of the mark for ``kfcomm_world``:

- ``ranks`` (2): their number.
- ``processes`` (False): each rank is a process of its own, not a task of a coroutine or a thread of a function.
- ``faults`` (none): a `kfcomm.testing.FaultPlan`.
- all others: in one process the options of `kfcomm.testing.world`, or of `kfcomm.testing.sync_world`; in several the
  arguments of ``kfcomm.init``.

A test of a coroutine with the mark runs under pytest-asyncio; it needs no mark of that.

This module is imported by every run of pytest where kfcomm is installed: it must not import what only some tests need.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

MARK = "kfcomm(ranks=2, processes=False, faults=None, **options): the world that the fixture kfcomm_world makes"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark and, with pytest-asyncio, the asynchronous worlds."""
    config.addinivalue_line("markers", MARK)
    if config.pluginmanager.hasplugin("asyncio"):
        config.pluginmanager.register(_asynchronous(), "kfcomm-asyncio")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Mark a marked coroutine for pytest-asyncio, too."""
    if collector.config.pluginmanager.hasplugin("kfcomm-asyncio") and _is_coroutine(obj):
        marks = {mark.name for mark in (*getattr(obj, "pytestmark", ()), *collector.iter_markers())}
        if "kfcomm" in marks and "asyncio" not in marks:
            pytest.mark.asyncio(obj)


@pytest.fixture
def kfcomm_world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A world of kfcomm for one test, as its mark ``kfcomm`` says: run(), outcomes(), kill()."""
    if _is_coroutine(request.function):
        if not request.config.pluginmanager.hasplugin("kfcomm-asyncio"):
            message = "an asynchronous test with kfcomm_world needs pytest-asyncio: pip install pytest-asyncio"
            pytest.fail(message, pytrace=False)
        yield request.getfixturevalue("kfcomm_awaited_world")
    else:
        from kfcomm.testing.directed import blocking_world

        with blocking_world(**_options(request)) as world:
            yield world


def _asynchronous() -> Any:
    import pytest_asyncio

    class Asynchronous:
        """Objects that need a loop to be made."""

        @pytest_asyncio.fixture
        async def kfcomm_awaited_world(self, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
            """World of a test, as ``kfcomm_world`` documents it."""
            from kfcomm.testing.directed import awaited_world

            async with awaited_world(**_options(request)) as world:
                yield world

    return Asynchronous()


def _options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of the nearest mark."""
    mark = request.node.get_closest_marker("kfcomm")
    if mark is None:
        return {"ranks": 2}
    if mark.args:
        pytest.fail("the mark kfcomm takes keywords only, as in kfcomm(ranks=4)", pytrace=False)
    return {"ranks": 2, **mark.kwargs}


def _is_coroutine(function: object) -> bool:
    searched = getattr(function, "hypothesis", None)  # a test of hypothesis is a wrapper, never a coroutine
    return inspect.iscoroutinefunction(searched.inner_test if searched else function)
