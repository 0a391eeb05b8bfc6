"""Rules for every test: nothing is left behind, nothing is timed, a skip says why."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from bench.netlab import why_unavailable
from tests.leaks import Snapshot, left_since
from tests.support import LoopFactory, Watch, loop_factories

# Examples have no time limit: on a loaded machine that would only find the load. How large they are is left to chance.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large]
# The same examples come up every time: no run of a newcomer, and no gate of coverage, fails by chance. Chance is for
# `make search`, which looks for longer.
settings.register_profile(
    "kfcomm", deadline=None, print_blob=True, suppress_health_check=UNCHECKED, derandomize=True, database=None
)
settings.register_profile("coverage", settings.get_profile("kfcomm"), max_examples=20)
settings.register_profile("search", settings.get_profile("kfcomm"), derandomize=False, max_examples=1000)
settings.load_profile("kfcomm")

QUICK_CASES = 3
"""Of each test, which `make test` runs; CI runs all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The loop of all tests of coroutines that choose none themselves."""
    factories = loop_factories()
    parser.addoption("--event-loop", choices=[*factories], default=next(iter(factories)), help="default: %(default)s")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """A test runs on the loop of the command line, or on each of those that its mark names."""
    factories = loop_factories()
    marker = item.get_closest_marker("asyncio")
    if marker is not None and "loop_factories" in marker.kwargs:
        return factories
    chosen = config.getoption("--event-loop")
    return {chosen: factories[chosen]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many cases all but some are slow: always the same ones, chosen by chance."""
    cases: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        is_chosen = any(item.get_closest_marker(mark) for mark in ("slow", "quick"))
        if isinstance(item, pytest.Function) and not is_chosen:
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for (_, name), same in cases.items():
        if len(same) > QUICK_CASES:
            quick = set(random.Random(name).sample(range(len(same)), QUICK_CASES))
            for number, item in enumerate(same):
                if number not in quick:
                    item.add_marker("slow")


def pytest_configure() -> None:
    """Signals are heard, here and in what is started, also under nohup or in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where ``tempfile`` puts things during the tests, in this process and in its children."""
    tmp_path_factory.getbasetemp()  # pytest's own folder lies elsewhere: nothing in it counts as left behind
    with tempfile.TemporaryDirectory(prefix="kf") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # what was measured here changes no test
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True, scope="module")
def kept_is_no_garbage() -> Iterator[None]:
    """Garbage from before a module is left alone: to search all of it after each test took half of the time.

    That of the module is collected at its end, so that its warnings are not blamed on the next module.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="session")
def loops_met() -> None:
    """The first uvloop loop of a process opens a pipe that stays: no test is to be blamed for it."""
    next(iter(loop_factories().values()))().close()


@pytest.fixture(autouse=True)
def nothing_left_behind(temporary_files: Path, loops_met: None) -> Iterator[None]:
    """Fails a test that leaves processes, threads, descriptors or temporary files."""
    before = Snapshot.take(temporary_files)
    yield
    left = left_since(before, temporary_files)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left_on_loop(request: pytest.FixtureRequest, nothing_left_behind: None) -> None:
    """Fails a test of a coroutine that leaves tasks on its loop, or unretrieved errors."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("watched_loop")


@pytest_asyncio.fixture
async def watched_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Looks at the loop after the test and all its other fixtures; with hypothesis, after each example, too."""
    watch = Watch()
    if hypothesis := getattr(request.function, "hypothesis", None):
        monkeypatch.setattr(hypothesis, "inner_test", watch.around(hypothesis.inner_test))
    yield
    await watch.settle()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what this machine cannot do; where it is required (``KFCOMM_REQUIRE_NETNS=1``), fails instead."""
    if item.get_closest_marker("netns") and (reason := _no_namespaces()):
        if os.environ.get("KFCOMM_REQUIRE_NETNS") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    if item.get_closest_marker("gpu") and not Path("/dev/nvidia0").exists():
        pytest.skip("no NVIDIA GPU on this machine")


@functools.cache
def _no_namespaces() -> str:
    """Why hosts cannot be made of network namespaces here; empty where they can."""
    return why_unavailable()
