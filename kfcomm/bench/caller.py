"""The asynchronous and the blocking interface behind one: coroutines, which never wait for the blocking one.

A prepared run makes the calls of a load once and returns their results; its time is that of the calls alone.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import kfcomm.sync
from kfcomm.bench.load import Call
from kfcomm.bench.suite import Mode, Place, Suite
from kfcomm.engine.session import Session
from kfcomm.joining import init
from kfcomm.rendezvous.host import host_and_port, store_url
from kfcomm.rendezvous.settings import detect
from kfcomm.types import Layout, override

Run = Callable[[], Awaitable[Sequence[Any]]]


class Caller(ABC):
    """The world of one rank, through one of the interfaces.

    Attributes:
        session: of the communicator; its ``devices`` are those of the ranks.
    """

    def __init__(self, comm: Any, session: Session) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.layout: Layout = comm.layout
        self.session = session
        self._comm = comm

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Make an array in symmetric memory, as ``Communicator.empty`` does."""
        return self._comm.empty(shape, dtype)

    def prepared(self, calls: Sequence[Call], mode: Mode | None) -> Run:
        """Return a function that makes the calls once, in order; ``mode``: whether each waits for the one before."""
        makers = {Mode.FUSED: self._fused, Mode.ALL_AT_ONCE: self._all_at_once, Mode.ONE_BY_ONE: self._one_by_one}
        return makers[mode or Mode.ONE_BY_ONE](calls)

    def _bound(self, calls: Sequence[Call], suffix: str = "") -> list[Callable[[], Any]]:
        return [partial(getattr(self._comm, f"{call.verb}{suffix}"), **call.arguments) for call in calls]

    def _many(self, calls: Sequence[Call]) -> Callable[[], Any]:
        """All calls as one ``all_reduce_many``, whose results have memory of their own."""
        return partial(self._comm.all_reduce_many, {call.name: call.x for call in calls}, **calls[0].options)

    @abstractmethod
    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Make any call of the communicator, and return its result."""

    @abstractmethod
    def _one_by_one(self, calls: Sequence[Call]) -> Run: ...

    @abstractmethod
    def _all_at_once(self, calls: Sequence[Call]) -> Run: ...

    @abstractmethod
    def _fused(self, calls: Sequence[Call]) -> Run: ...


class AsyncCaller(Caller):
    """The verbs of ``kfcomm.Communicator``, which are begun and then awaited."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, comm._session)

    @override
    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self._comm, verb)(*arguments, **options)

    def _one_by_one(self, calls: Sequence[Call]) -> Run:
        begins = self._bound(calls)

        async def run() -> Sequence[Any]:
            return [await begin() for begin in begins]

        return run

    def _all_at_once(self, calls: Sequence[Call]) -> Run:
        begins = self._bound(calls)

        async def run() -> Sequence[Any]:
            handles = [begin() for begin in begins]
            return [await handle for handle in handles]

        return run

    def _fused(self, calls: Sequence[Call]) -> Run:
        many = self._many(calls)

        async def run() -> Sequence[Any]:
            return [*(await many()).values()]

        return run


class BlockingCaller(Caller):
    """The verbs of ``kfcomm.sync.Communicator``, which return when they are done."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm, comm._inner._session)

    @override
    async def do(self, verb: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self._comm, verb)(*arguments, **options)

    def _one_by_one(self, calls: Sequence[Call]) -> Run:
        verbs = self._bound(calls)

        async def run() -> Sequence[Any]:
            return [verb() for verb in verbs]

        return run

    def _all_at_once(self, calls: Sequence[Call]) -> Run:
        begins = self._bound(calls, "_async")

        async def run() -> Sequence[Any]:
            handles = [begin() for begin in begins]
            return [handle.wait() for handle in handles]

        return run

    def _fused(self, calls: Sequence[Call]) -> Run:
        many = self._many(calls)

        async def run() -> Sequence[Any]:
            return [*many().values()]

        return run


@asynccontextmanager
async def opened(suite: Suite, transport: str, number: int) -> AsyncIterator[Caller]:
    """Join the world of this process over one kind of links, for the ``number``-th time.

    Raises:
        ConfigError, RendezvousError: as from ``kfcomm.init``.
    """
    device, (store, token) = _device(suite.device), _store(number)
    if suite.blocking:
        with kfcomm.sync.init(transport=transport, device=device, store=store, token=token) as comm:
            yield BlockingCaller(comm)
    else:
        async with init(transport=transport, device=device, store=store, token=token) as comm:
            yield AsyncCaller(comm)


def _device(place: Place) -> str:
    """The device to ask for: none unless arrays are on it, so that no library is loaded."""
    if place is not Place.GPU:
        return "none"
    asked = detect(os.environ).device
    return "cuda" if asked in ("auto", "none") else asked


def _store(number: int) -> tuple[str | None, bytes | None]:
    """Store and token of the world; None for those of the environment.

    A store that rank 0 serves ends with each world. Each is served at its own port, so that no early rank of the next
    world joins the store of the last one.
    """
    settings = detect(os.environ)
    if settings.store is None or not settings.serve:
        return None, None
    host, port = host_and_port(settings.store)
    return store_url(host, port + number), settings.token
