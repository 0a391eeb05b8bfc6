"""Blocking calls that do their work themselves: the baton, and what happens when they are interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kfcomm import sync
from kfcomm.errors import SessionClosed
from kfcomm.sync.baton import Baton
from kfcomm.sync.standin import StandIn


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[sync.Communicator]:
    """A world of one: nothing arrives, so that a blocking call never needs the I/O thread."""
    for name in ("KFCOMM_RANK", "KFCOMM_SIZE", "KFCOMM_STORE"):
        monkeypatch.delenv(name, raising=False)
    with sync.init() as comm:
        yield comm


def threads_of_posts(comm: sync.Communicator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads on which the engine is used from now on."""
    engine = comm._inner._session.engine
    post, seen = engine.post, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(threading.current_thread().name)
        return post(*args, **kwargs)

    monkeypatch.setattr(engine, "post", noted)
    return seen


def test_the_caller_does_the_work(alone: sync.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_of_posts(alone, monkeypatch)
    assert alone.all_reduce(np.ones(3)).tolist() == [1, 1, 1]
    alone.all_reduce_async(np.ones(3)).wait()
    assert seen == [threading.main_thread().name, "kfcomm-io"]


def test_many_threads_stand_in_by_turns(alone: sync.Communicator) -> None:
    results: list[int] = []

    def main(number: int) -> None:
        for count in range(50):
            total = alone.all_reduce(np.array(number), name=f"{number}/{count % 3}")
            results.append(int(total))

    threads = [threading.Thread(target=main, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [number for number in range(4) for _ in range(50)]


def test_errors_of_the_arguments_are_the_callers(alone: sync.Communicator) -> None:
    with pytest.raises(ValueError, match="root 7 is not a rank"):
        alone.reduce(np.ones(1), root=7)
    assert alone.all_reduce(np.ones(1)).tolist() == [1]


def test_who_asks_for_the_baton_gets_it_before_the_one_who_lays_it_down() -> None:
    baton = Baton()
    order = []
    baton.take()

    def other() -> None:
        baton.take()
        order.append("other")
        baton.lay_down()

    thread = threading.Thread(target=other)
    thread.start()
    while not baton.is_wanted:
        pass
    baton.lay_down()
    baton.take()
    order.append("first")
    baton.lay_down()
    thread.join()
    assert order == ["other", "first"]


def test_an_interruption_between_two_looks_cancels_the_call_alone(
    alone: sync.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(stand_in: StandIn, future: Any) -> None:
        stand_in._works = False
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StandIn, "_look_until_done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            alone.all_reduce(np.ones(1), name="x")
    assert alone.all_reduce(np.ones(1), name="x").tolist() == [1]


def test_an_interruption_in_the_midst_of_the_work_closes_the_communicator(
    alone: sync.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StandIn, "_look_until_done", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alone.all_reduce(np.ones(1), name="x")
    with pytest.raises(SessionClosed, match="interrupted at its work by KeyboardInterrupt"):
        alone.all_reduce(np.ones(1), name="x")
