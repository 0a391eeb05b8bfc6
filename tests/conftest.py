"""Rules for every test: nothing is left behind, nothing is timed, a skip says why."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench.netlab import why_unavailable
from tests.leaks import Snapshot, left_since
from tests.support import loop_factory

# Examples have no time limit: on a loaded machine that would only find the load. How large they are is left to chance.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("kfcomm", deadline=None, print_blob=True, suppress_health_check=UNCHECKED)
# Under the coverage gate the same examples come up every time, so that the gate never depends on chance.
settings.register_profile("coverage", settings.get_profile("kfcomm"), derandomize=True, max_examples=20, database=None)
settings.load_profile("kfcomm")


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


@pytest.fixture(scope="session")
def loops_met() -> None:
    """The first uvloop loop of a process opens a pipe that stays: no test is to be blamed for it."""
    loop_factory()().close()


@pytest.fixture(autouse=True)
def nothing_left_behind(temporary_files: Path, loops_met: None) -> Iterator[None]:
    """Fails a test that leaves processes, threads, descriptors or temporary files."""
    before = Snapshot.take(temporary_files)
    yield
    left = left_since(before, temporary_files)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


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
