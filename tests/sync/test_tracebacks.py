"""Tracebacks and logs of blocking verbs that fail, also where the program never reads the error."""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm import strategies
from kfcomm.common.tracebacks import terse
from kfcomm.sync.driver import Driver
from kfcomm.testing import sync_world
from kfcomm.types import Layout
from tests.stubs import Broken, broken
from tests.support import free_port

PACKAGE = Path(kfcomm.__file__).parent
X = np.ones(2)
SECRET = "0123456789abcdef" * 4

CALLS: dict[str, Callable[[Any], Any]] = {
    "the first call of a name": lambda comm: comm.all_reduce(X, "first", op="noop"),
    "a repeated name": lambda comm: comm.all_reduce(X, "again", out=np.ones(3)),
    "a timeout": lambda comm: comm.reduce(X, 1, "late", timeout=0.01),
    "a timeout of a barrier": lambda comm: comm.barrier("late", timeout=0.01),
    "no array": lambda comm: comm.all_gather({1}, "a"),
    "a handle": lambda comm: comm.all_reduce_async(X, "handle", op="noop").wait(),
    "a result": lambda comm: comm.all_reduce_async(X, "handle", op="noop").result(),
    "a group": lambda comm: comm.group([9]),
    "a split": lambda comm: comm.split(0, timeout=0.01),
    "a message": lambda comm: comm.recv(9),
    "a request": lambda comm: comm.request(9, "blob"),
    "something saved": lambda comm: comm.save("blob", {1}),
    "a persistent collective": lambda comm: comm.all_reduce_init(X, op="noop").run(),
    "its start": lambda comm: comm.all_reduce_init(X, op="noop").start(),
    "its wait": lambda comm: comm.barrier_init("late", timeout=0.01).start().wait(),
    "a queue": lambda comm: comm.queue("q", 0, 9),
    "a put": lambda comm: comm.queue("q", 0, 1).put({1}),
    "an invalid timeout": lambda comm: comm.set_timeout(-1),
    "memory for an array": lambda comm: comm.empty(-3),
    "a policy": lambda comm: kfcomm.sync.Adaptation(comm, ["nope"]),
}


def test_a_cause_inside_the_package_is_dropped() -> None:
    with pytest.raises(kfcomm.ConfigError) as inside:
        strategies.build("noop", Layout.even(2))
    assert inside.tb.tb_next is not None  # the first frame is this test's
    error = kfcomm.ConfigError("the name cannot work")
    error.__cause__ = inside.value.with_traceback(inside.tb.tb_next)
    assert terse(error).__cause__ is None


@pytest.mark.parametrize("call", CALLS)
def test_an_error_ends_at_the_callers_line(call: str) -> None:
    with sync_world(2) as comms, pytest.raises(kfcomm.KfcommError) as failed:
        CALLS[call](comms[0])
    assert failed.value.__suppress_context__ or failed.value.__context__ is None
    own = [frame.filename for frame in traceback.extract_tb(failed.tb) if Path(frame.filename).is_relative_to(PACKAGE)]
    assert len(own) == 1
    frames = traceback.format_exception(failed.value)
    assert sum("Traceback" in line for line in frames) == 1
    assert "# noqa" not in "".join(frames)


def test_a_name_that_comes_again_fails_as_the_first_did() -> None:
    with sync_world(1) as (comm,):
        comm.all_reduce(X, "again")
        with pytest.raises(kfcomm.ConfigError) as failed:
            comm.all_reduce(X, "again", out=np.ones(3))
    assert len([one for one in traceback.extract_tb(failed.tb) if Path(one.filename).is_relative_to(PACKAGE)]) == 1


def test_foreign_code_stays_in_the_traceback() -> None:
    with sync_world(1) as (comm,):
        with pytest.raises(Broken) as failed:
            comm.all_reduce(broken("__array__"))
        assert "stubs.py" in "".join(traceback.format_tb(failed.tb))

        class Wrong:
            def __array__(self, *_: Any, **__: Any) -> Any:
                raise ValueError("not today")

        with pytest.raises(kfcomm.ConfigError) as refused:
            comm.all_reduce(Wrong())
    assert isinstance(refused.value.__cause__, ValueError)
    assert Path(__file__).name in "".join(traceback.format_tb(refused.value.__cause__.__traceback__))


def test_the_whole_story_on_demand_and_of_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    with sync_world(1) as (comm,):
        monkeypatch.setattr(comm._driver, "is_terse", False)
        with pytest.raises(kfcomm.ConfigError) as failed:
            comm.all_reduce(X, op="noop")
    assert len(traceback.extract_tb(failed.tb)) > 4
    with pytest.raises(kfcomm.InternalError) as defect:
        raise kfcomm.InternalError("a defect")
    assert terse(defect.value).__traceback__ is not None


def test_failed_join_shows_the_reason_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"http://127.0.0.1:{free_port()}"
    for value, has_story in (("short", False), ("full", True)):
        monkeypatch.setenv("KFCOMM_TRACEBACK", value)
        with pytest.raises(kfcomm.RendezvousError, match="could not be reached") as failed:
            kfcomm.sync.init(rank=1, size=2, store=store, token=SECRET, timeout=0.1)
        own = [one for one in traceback.extract_tb(failed.tb) if Path(one.filename).is_relative_to(PACKAGE)]
        assert (len(own) > 1) == has_story
        assert (sum("Traceback" in line for line in traceback.format_exception(failed.value)) > 1) == has_story


BAD: dict[str, dict[str, Any]] = {
    "a rank": {"rank": 5, "size": 2, "store": "http://127.0.0.1:1"},
    "a url": {"rank": 0, "size": 2, "store": "nowhere"},
    "a strategy": {"strategy": "nope"},
    "a file": {"metrics_port": "x"},
    "an interface": {"rank": 0, "size": 2, "store": "http://127.0.0.1:1", "token": SECRET, "interface": "nope0"},
    "a store": {"rank": 1, "size": 2, "store": "http://127.0.0.1:1", "token": SECRET, "timeout": 0.1},
}


async def _init(**settings: Any) -> None:
    await kfcomm.init(**settings)


async def _enter(**settings: Any) -> None:
    async with kfcomm.init(**settings):
        pass


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "init",
    [kfcomm.sync.init, lambda **given: asyncio.run(_init(**given)), lambda **given: asyncio.run(_enter(**given))],
    ids=["blocking", "awaited", "entered"],
)
def test_init_fails_at_the_callers_line(init: Callable[..., Any], bad: str) -> None:
    for traceback_, is_short in (("short", True), ("full", False)):
        with pytest.raises(kfcomm.KfcommError) as failed:
            init(**BAD[bad], traceback=traceback_)
        text = "".join(traceback.format_exception(failed.value))
        own = [one for one in traceback.extract_tb(failed.tb) if Path(one.filename).is_relative_to(PACKAGE)]
        assert (len(own) == 1) == is_short, text
        assert not is_short or text.count("Traceback (") == 1, text


def test_the_setting_reaches_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_terse in (("", True), ("short", True), ("full", False)):
        monkeypatch.setenv("KFCOMM_TRACEBACK", value)
        with kfcomm.sync.init() as comm:
            driver: Driver = comm._driver
            assert driver.is_terse is is_terse
    monkeypatch.setenv("KFCOMM_TRACEBACK", "long")
    with pytest.raises(kfcomm.ConfigError, match="short, full"):
        kfcomm.sync.init()


# ---------------------------------------------------------------- nobody looks


def test_a_failure_never_retrieved_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "kfcomm"), sync_world(2) as comms:
        handles = [comm.all_reduce_async(np.ones(2 + comm.rank), "grad/0") for comm in comms]
        with pytest.raises(kfcomm.CollectiveMismatch):
            handles.pop().wait()
        assert comms[0].all_reduce_async(X, "cancelled").cancel()
        in_flight = comms[0].all_reduce_async(X, "in flight")
        handles.clear()
        gc.collect()
        for comm in comms:
            comm.close()
        assert in_flight.done()
        del in_flight
        gc.collect()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "was never retrieved" in line]) == 1
    assert "rank 0: error was never retrieved: CollectiveMismatch: 'grad/0'" in lines[-1]
