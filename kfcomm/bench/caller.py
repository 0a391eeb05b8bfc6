"""One way to measure two interfaces: the asynchronous one, and the blocking one behind coroutines that never wait.

A prepared run does the calls of a load once and returns their results; nothing but the calls is in it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import kfcomm.sync
from kfcomm.bench.load import Call
from kfcomm.bench.suite import Mode, Place, Suite
from kfcomm.engine.session import Session
from kfcomm.joining import init
from kfcomm.rendezvous.settings import detect, host_and_port, store_url
from kfcomm.types import Layout

Run = Callable[[], Awaitable[Sequence[Any]]]


class Caller(Protocol):
    """The world of one rank, through one of the interfaces.

    Attributes:
        session: what the communicator is over; its ``devices`` say what the ranks have.
    """

    rank: int
    size: int
    layout: Layout
    session: Session

    def empty(self, shape: Any, dtype: Any) -> Any:
        """See ``Communicator.empty``."""

    def prepared(self, calls: Sequence[Call], mode: Mode | None) -> Run:
        """What does the calls once, in order; ``mode`` says whether each waits for the one before."""

    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Any one call on the communicator."""


class AsyncCaller:
    """The verbs of ``kfcomm.Communicator``, which are begun and then awaited."""

    def __init__(self, comm: Any) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.layout: Layout = comm.layout
        self.session: Session = comm._session
        self._comm = comm

    def empty(self, shape: Any, dtype: Any) -> Any:
        """See `Caller`."""
        return self._comm.empty(shape, dtype)

    def prepared(self, calls: Sequence[Call], mode: Mode | None) -> Run:
        """See `Caller`."""
        begins = [partial(getattr(self._comm, call.verb), **call.arguments) for call in calls]

        async def one_by_one() -> Sequence[Any]:
            return [await begin() for begin in begins]

        async def all_at_once() -> Sequence[Any]:
            handles = [begin() for begin in begins]
            return [await handle for handle in handles]

        async def fused() -> Sequence[Any]:
            return [*(await many()).values()]

        many = _many(self._comm, calls)
        return {Mode.FUSED: fused, Mode.ALL_AT_ONCE: all_at_once}.get(mode or Mode.ONE_BY_ONE, one_by_one)

    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """See `Caller`."""
        return await getattr(self._comm, verb)(*arguments, **options)


class BlockingCaller:
    """The verbs of ``kfcomm.sync.Communicator``, which return when they are done."""

    def __init__(self, comm: Any) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.layout: Layout = comm.layout
        self.session: Session = comm._inner._session
        self._comm = comm

    def empty(self, shape: Any, dtype: Any) -> Any:
        """See `Caller`."""
        return self._comm.empty(shape, dtype)

    def prepared(self, calls: Sequence[Call], mode: Mode | None) -> Run:
        """See `Caller`."""
        verbs = [partial(getattr(self._comm, call.verb), **call.arguments) for call in calls]
        begins = [partial(getattr(self._comm, f"{call.verb}_async"), **call.arguments) for call in calls]

        async def one_by_one() -> Sequence[Any]:
            return [verb() for verb in verbs]

        async def all_at_once() -> Sequence[Any]:
            handles = [begin() for begin in begins]
            return [handle.wait() for handle in handles]

        async def fused() -> Sequence[Any]:
            return [*many().values()]

        many = _many(self._comm, calls)
        return {Mode.FUSED: fused, Mode.ALL_AT_ONCE: all_at_once}.get(mode or Mode.ONE_BY_ONE, one_by_one)

    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """See `Caller`."""
        return getattr(self._comm, verb)(*arguments, **options)


def _many(comm: Any, calls: Sequence[Call]) -> Callable[[], Any]:
    """All calls as one ``all_reduce_many``, whose results have memory of their own."""
    return partial(comm.all_reduce_many, {call.name: call.x for call in calls}, **calls[0].options)


@asynccontextmanager
async def opened(suite: Suite, transport: str, number: int) -> AsyncIterator[Caller]:
    """Join the world of this process over one kind of links, for the ``number``-th time.

    Raises:
        ConfigError, RendezvousError: see ``kfcomm.init``.
    """
    device, (store, token) = _device(suite.device), _store(number)
    if suite.blocking:
        with kfcomm.sync.init(transport=transport, device=device, store=store, token=token) as comm:
            yield BlockingCaller(comm)
    else:
        async with init(transport=transport, device=device, store=store, token=token) as comm:
            yield AsyncCaller(comm)


def _device(place: Place) -> str:
    """What is asked for: no library is loaded for a device that nothing is measured on."""
    if place is not Place.GPU:
        return "none"
    asked = detect(os.environ).device
    return "cuda" if asked in ("auto", "none") else asked


def _store(number: int) -> tuple[str | None, bytes | None]:
    """Where the world meets, and with which token; None for what the environment says.

    A store that rank 0 serves ends with each world. So that no rank, early for the next one, takes the last one's
    for it, each is served at a port of its own.
    """
    settings = detect(os.environ)
    if settings.store is None or not settings.serve:
        return None, None
    host, port = host_and_port(settings.store)
    return store_url(host, port + number), settings.token
