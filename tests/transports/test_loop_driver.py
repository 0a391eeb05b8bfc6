"""An asyncio loop that drives a reactor: when it looks, when it rests, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kfcomm.transports import loop_driver
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from tests.support import LeftOnLoop, Watch, on_every_loop
from tests.transports.test_reactor import Fake


@contextlib.contextmanager
def driven(looks: int = 1) -> Iterator[tuple[Reactor, LoopDriver]]:
    """A reactor and its driver on the running loop."""
    reactor = Reactor()
    driver = LoopDriver(reactor, asyncio.get_running_loop(), looks=looks)
    try:
        yield reactor, driver
    finally:
        driver.close()


async def called(reactor: Reactor, how: Any, *arguments: Any) -> None:
    """Returns when a call that is asked for in this way has come."""
    done = asyncio.Event()
    how(*arguments, done.set)
    await done.wait()


async def resting(poller: Fake) -> None:
    """Turns of the loop until this poller is parked."""
    while poller.is_awake:  # noqa: ASYNC110  nobody is told
        await asyncio.sleep(0)


@on_every_loop
async def test_calls_timers_and_descriptors_wake_the_loop() -> None:
    def from_a_thread(reactor: Reactor, callback: Callable[[], None]) -> None:
        thread = threading.Thread(target=reactor.call_soon_threadsafe, args=(callback,))
        thread.start()
        thread.join()

    one, other = socket.socketpair()
    with driven() as (reactor, _), one, other:
        for _ in range(3):
            await called(reactor, reactor.call_soon)
            await called(reactor, reactor.call_soon_threadsafe)
            await called(reactor, reactor.call_later, 0.0)
            await called(reactor, reactor.call_later, 0.001)
            await called(reactor, from_a_thread, reactor)
        other.send(b"x")
        await called(reactor, reactor.add_reader, one.fileno())
        reactor.remove_reader(one.fileno())
        await called(reactor, reactor.add_writer, one.fileno())
        reactor.remove_writer(one.fileno())


@on_every_loop
async def test_an_earlier_timer_takes_the_place_of_a_later_one() -> None:
    with driven() as (reactor, _):
        reactor.call_later(1e6, lambda: 1 // 0)
        await asyncio.sleep(0)
        await called(reactor, reactor.call_later, 0.001)
        late = reactor.call_later(0.001, lambda: 1 // 0)
        late.cancel()
        await called(reactor, reactor.call_later, 0.002)


@on_every_loop
async def test_calls_come_one_after_the_other_and_never_inside_the_one_that_asks() -> None:
    with driven() as (reactor, _):
        seen: list[int] = []
        reactor.call_soon(seen.append, 1)
        reactor.call_soon(seen.append, 2)
        assert not seen
        await called(reactor, reactor.call_soon)
        assert seen == [1, 2]


@on_every_loop
async def test_a_poller_is_looked_at_until_it_is_quiet_and_then_parked() -> None:
    with driven(looks=4) as (reactor, _):
        poller = Fake()
        reactor.pollers.append(poller)
        for _ in range(3):
            poller.moves = 100
            poller.is_awake = True
            reactor.wake()
            await resting(poller)
            assert poller.moves < 0
        looks = poller.looks
        for _ in range(20):
            await asyncio.sleep(0)
        assert poller.looks == looks  # a parked process costs nothing


@on_every_loop
async def test_awaited_news_are_polled_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_driver, "SPIN_S", 1e6)
    monkeypatch.setattr(loop_driver, "LINGER_S", -1.0)
    with driven() as (reactor, _):
        poller = Fake()
        poller.is_needed = True
        reactor.pollers.append(poller)
        reactor.wake()
        for _ in range(50):
            await asyncio.sleep(0)
        assert poller.is_awake
        poller.is_needed = False
        await resting(poller)


@on_every_loop
async def test_a_poller_that_will_not_be_parked_is_looked_at_again() -> None:
    with driven() as (reactor, _):
        poller = Fake(refusals=3)
        reactor.pollers.append(poller)
        reactor.wake()
        while poller.refusals >= 0:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0)
        assert not poller.is_awake


@on_every_loop
async def test_a_poller_that_always_moves_leaves_the_loop_its_turns() -> None:
    with driven(looks=16) as (reactor, _):
        poller = Fake(moves=10**9)
        reactor.pollers.append(poller)
        reactor.wake()
        before = poller.looks
        for _ in range(10):
            await asyncio.sleep(0)
        assert before < poller.looks <= before + 20
        poller.moves = 0
        await resting(poller)


@on_every_loop
async def test_an_error_reaches_the_handler_of_the_loop_and_the_rest_goes_on() -> None:
    loop = asyncio.get_running_loop()
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    with driven() as (reactor, _):
        reactor.call_soon(lambda: 1 // 0)
        await called(reactor, reactor.call_soon)
    assert [type(context["exception"]) for context in unheard] == [ZeroDivisionError]
    assert "engine" in unheard[0]["message"]


@on_every_loop
async def test_close_leaves_nothing() -> None:
    loop = asyncio.get_running_loop()
    with driven() as (reactor, driver):
        reactor.call_later(0.0, lambda: 1 // 0)
        reactor.call_soon(lambda: 1 // 0)
        (descriptor,) = reactor.descriptors()
        poller = Fake()
        reactor.pollers.append(poller)
        driver.close()
        driver.close()
        assert not loop.remove_reader(descriptor)
        driver.wake()
        reactor.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    assert poller.looks == 0


@on_every_loop
async def test_it_may_be_closed_from_a_callback() -> None:
    with driven() as (reactor, driver):
        await called(reactor, reactor.call_soon)
        reactor.pollers.append(Fake())
        reactor.call_soon(driver.close)
        while reactor.descriptors():  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0)


@on_every_loop
async def test_the_loop_reports_errors_never_retrieved() -> None:
    watch = Watch()
    with driven() as (reactor, _):
        reactor.call_soon(lambda: 1 // 0)
        await called(reactor, reactor.call_soon)
    with pytest.raises(LeftOnLoop, match="ZeroDivisionError"):
        await watch.settle()
