"""Store of a job, served by an actor: over HTTP to the ranks, and by calls of the actor to the driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.keyvalue import BOUNDS, Exit, KeyValue, StoreClosed
from kfcomm.rendezvous.store import MAX_WAIT_S, StoreServer
from kfcomm.types import override


class StoreActor:
    """Actor that serves a store in its memory. Calls wait until it serves."""

    def __init__(self) -> None:
        self._is_serving = asyncio.Event()

    async def serve(self, token: str, bounds: bytes | None) -> str:
        """Serve at this node's address; return the URL. ``bounds``: see ``keyvalue.BOUNDS``; None for a fixed size."""
        self._server = await StoreServer.start(ray.util.get_node_ip_address(), token=token.encode())
        if bounds is not None:
            await self._server.store.set(BOUNDS, bounds)
        self._is_serving.set()
        return self._server.url

    async def call(self, verb: str, *args: Any, **options: Any) -> Any:
        """Result of a method of the store, a `KeyValue`."""
        await self._is_serving.wait()
        return await getattr(self._server.store, verb)(*args, **options)

    async def exits_since(self, seen: int, host: int | None) -> list[Exit]:
        """Wait for exits beyond the first ``seen`` ones; none after a while."""
        await self._is_serving.wait()
        return await self._server.store.contents.exits_since(seen, MAX_WAIT_S, host)


class ActorStore(KeyValue):
    """Store of a job as the driver uses it: by calls of the actor, which also reach it through Ray's client."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @override
    async def find(self, key: str) -> bytes | None:
        found: bytes | None = await _answer(self._actor.call.remote("find", key))
        return found

    @override
    async def set(self, key: str, value: bytes) -> None:
        await _answer(self._actor.call.remote("set", key, value))

    @override
    async def claim(self, key: str, value: bytes) -> bytes:
        held: bytes = await _answer(self._actor.call.remote("claim", key, value))
        return held

    @override
    async def collect(self, folder: str, count: int, *, timeout_s: float) -> dict[str, bytes]:
        found: dict[str, bytes] = await _answer(
            self._actor.call.remote("collect", folder, count, timeout_s=min(timeout_s, MAX_WAIT_S))
        )
        return found

    @override
    async def report_exit(self, end: Exit) -> None:
        await _answer(self._actor.call.remote("report_exit", end))

    @override
    async def watch_exits(self, host: int | None = None, *, lasting: bool = False) -> AsyncIterator[Exit]:
        seen = 0
        while True:
            try:
                found = await _answer(self._actor.exits_since.remote(seen, host))
            except StoreClosed:
                return
            for end in found:
                seen += 1
                yield end


async def _answer(asked: Awaitable[Any]) -> Any:
    """Answer of the actor.

    Raises:
        StoreClosed: it is gone, and its contents with it.
        RendezvousError: it cannot be reached now.
    """
    try:
        return await asked
    except ActorUnavailableError as error:
        raise RendezvousError(f"the actor of the store cannot be reached: {error}") from error
    except RayActorError as error:
        raise StoreClosed(f"the actor of the store is gone: {error}") from error
