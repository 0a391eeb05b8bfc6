"""Receives that time out or are cancelled at any moment: no message is lost or repeated, and the order is kept.

    python -m tests.search.receives --seconds 60 --seed 1
    python -m tests.search.receives --messages 100000 --seed 1 --links memory --links tcp

Two ranks send numbers to a third one, in several forms at once. The third rank takes each number by receives; most
receives end too early. Messages are small or of 800 KB, and every element identifies the number. After a receive has
ended without a message, its memory must not be written to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError as NotWanted
from random import Random
from typing import Any, NamedTuple

import click
import numpy as np

import kfcomm
from kfcomm import testing
from kfcomm.errors import CollectiveTimeout
from tests.processes.stage import TOKEN, served
from tests.sync.worlds import joined

LINKS = (
    "memory", "shared memory", "shm", "unix", "tcp", "blocking shm", "blocking unix", "blocking tcp",
)  # fmt: skip
SMALL, LARGE = 3, 100_000
"""Elements of 8 bytes."""
LARGE_OF = 3
"""Of so many flows one is of large messages."""
FLOWS = 6
"""At a time, of each sender."""
HANG_S = 120.0
SOON_S = 3e-3

Taken = list[tuple[int, int]]
"""Senders and numbers of the messages that one attempt has brought, in the order of the receives."""


class Flow(NamedTuple):
    """Numbered messages to rank 0 in one form, from one sender, or from both for any."""

    form: str
    sources: tuple[int, ...]
    tag: str
    count: int
    elements: int
    in_group: bool
    is_slow: bool


class Books:
    """Progress of one flow."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.next = dict.fromkeys(flow.sources, 0)
        self.attempts = self.amid = 0
        self.abandoned: list[np.ndarray[Any, Any]] = []

    @property
    def left(self) -> int:
        """Messages that have not come."""
        return len(self.flow.sources) * self.flow.count - sum(self.next.values())

    def enter(self, taken: Taken) -> None:
        """Record the messages of one attempt."""
        self.attempts += 1
        for source, number in taken:
            if number != self.next[source]:
                raise AssertionError(f"{self.flow}: {number} of rank {source} came where {self.next[source]} was next")
            self.next[source] += 1
        for out in self.abandoned:
            if not (out == -1).all():
                raise AssertionError(f"{self.flow}: memory of a receive that had ended was written to")
        if self.abandoned and taken:
            self.abandoned.clear()


def number_of(x: Any) -> int:
    """Of a message, whose elements are all the same."""
    array = np.asarray(x)
    first = int(array.flat[0])
    if not (array == first).all():
        raise AssertionError(f"a message made of several: {np.unique(array)}")
    return first


def payload(flow: Flow, number: int) -> Any:
    """One message."""
    return np.full(flow.elements, number)


def plan(chance: Random, messages: int, *, blocking: bool) -> list[Flow]:
    """Flows of so many messages together."""
    forms = ("array", "out", "object", "queue", "persistent", "any") + (() if blocking else ("several",))
    flows = []
    for place in range(FLOWS):
        form = chance.choice(forms)
        is_large = chance.randrange(LARGE_OF) == 0 and form != "object"
        sources = (1, 2) if form == "any" else (chance.choice((1, 2)),)
        count = max(1, messages // FLOWS // len(sources) // (4 if is_large else 1))
        in_group, is_slow = chance.random() < 0.25, chance.random() < 0.7
        elements = LARGE if is_large else SMALL
        flows.append(Flow(form, sources, f"{form} {place}", count, elements, in_group, is_slow))
    return flows


# ---------------------------------------------------------------- asyncio


@contextlib.asynccontextmanager
async def world(links: str) -> AsyncIterator[Sequence[Any]]:
    """Three ranks on this loop."""
    if links in ("memory", "shared memory"):
        async with testing.world(3, transport="memory" if links == "memory" else "shm", timeout=HANG_S) as comms:
            yield comms
        return
    with served() as store:
        usual: dict[str, Any] = {"size": 3, "store": store.url, "serve": False, "token": TOKEN, "transport": links}
        contexts = [kfcomm.init(rank=rank, device="none", timeout=HANG_S, **usual) for rank in range(3)]
        comms = await asyncio.gather(*(context.__aenter__() for context in contexts))
        yield comms
        await asyncio.gather(*(context.__aexit__(None, None, None) for context in contexts))


async def pause(chance: Random) -> None:
    """A few turns of the loop, or a moment."""
    if chance.random() < 0.7:
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(chance.random() * SOON_S)


async def send_all(comm: Any, flow: Flow, chance: Random) -> None:
    """The messages of one sender."""
    queue = comm.queue(flow.tag, comm.rank, 0, capacity=chance.choice([1, 4])) if flow.form == "queue" else None
    under_way: list[Any] = []
    for number in range(flow.count):
        x = payload(flow, number)
        if queue is not None:
            await queue.put(x)
        elif flow.form == "object":
            under_way.append(comm.send_object(number, 0, flow.tag, synchronous=chance.random() < 0.5))
        else:
            under_way.append(comm.send(x, 0, flow.tag, synchronous=chance.random() < 0.5))
        if len(under_way) > chance.randrange(1, 6):
            await under_way.pop(0)
        await (asyncio.sleep(chance.random() * SOON_S) if flow.is_slow else pause(chance))
    await asyncio.gather(*under_way)


class Taker:
    """Takes the messages of one flow on rank 0 of an asynchronous communicator."""

    def __init__(self, comm: Any, flow: Flow, chance: Random) -> None:
        self.comm, self.flow, self.chance = comm, flow, chance
        self.books = Books(flow)
        self.source = None if flow.form == "any" else flow.sources[0]
        self.queue = comm.queue(flow.tag, self.source, 0) if flow.form == "queue" else None
        self.out = np.zeros(flow.elements, np.int64)
        self.again = comm.recv_init(self.source, flow.tag) if flow.form == "persistent" else None
        self.mailbox = getattr(comm, "_inner", comm)._mailbox
        kind = "queue " if self.queue is not None else "object tag " if flow.form == "object" else "tag "
        self.key = f"{kind}{flow.tag!r}"
        self.ways = [self.polled, self.cancelled, self.waited_for, self.timed, self.in_a_task]

    async def run(self) -> Books:
        """Until all have come."""
        while self.books.left:
            way = self.several if self.flow.form == "several" else self.chance.choice(self.ways)
            self.books.enter(await way())
            await pause(self.chance)
        return self.books

    def begin(self, timeout_s: float | None = None) -> Awaitable[Any]:
        """One receive."""
        source, tag = self.source, self.flow.tag
        if self.queue is not None:
            return self.queue.get(timeout=timeout_s)
        if self.flow.form == "object":
            return self.comm.recv_object(source, tag, timeout=timeout_s)
        if self.again is not None and timeout_s is None:
            return self.again.start()
        if self.flow.form == "any":
            return self.comm.recv_any(tag=tag, timeout=timeout_s)
        out = None
        if self.flow.form == "out" and self.chance.random() < 0.7:
            out = self.out = np.zeros(self.flow.elements, np.int64)
        return self.comm.recv(source, tag, out=out, timeout=timeout_s)

    def soon_s(self) -> float:
        """A deadline: before any message, during one, or after a small one."""
        return self.chance.choice([0, 1e-4, 5e-4, SOON_S]) * self.chance.random()

    def taken(self, result: Any) -> Taken:
        """One message."""
        if self.flow.form == "any":
            return [(result[1], number_of(result[0]))]
        return [(self.flow.sources[0], number_of(result))]

    def nothing(self) -> Taken:
        """A receive has ended without a message: its memory is the caller's."""
        self.books.amid += self.mailbox._streams.free(self.flow.sources[0], self.key) is not None
        if self.flow.form == "out":
            self.out[:] = -1
            self.books.abandoned.append(self.out)
            self.out = np.zeros(self.flow.elements, np.int64)
        return []

    async def polled(self) -> Taken:
        try:
            return self.taken(await self.begin(self.soon_s()))
        except CollectiveTimeout:
            return self.nothing()

    async def cancelled(self) -> Taken:
        begun = self.begin()
        handle = asyncio.ensure_future(begun) if asyncio.iscoroutine(begun) else begun
        await pause(self.chance)
        handle.cancel()  # type: ignore[attr-defined]
        try:
            return self.taken(await handle)
        except asyncio.CancelledError:
            return self.nothing()

    async def waited_for(self) -> Taken:
        try:
            return self.taken(await asyncio.wait_for(self.as_coroutine(), self.soon_s()))
        except TimeoutError:
            return self.nothing()

    async def timed(self) -> Taken:
        try:
            async with asyncio.timeout(self.soon_s()):
                result = await self.begin()
        except TimeoutError:
            return self.nothing()
        return self.taken(result)

    async def in_a_task(self) -> Taken:
        task = asyncio.create_task(self.as_coroutine())
        await pause(self.chance)
        task.cancel()
        try:
            return self.taken(await task)
        except asyncio.CancelledError:
            return self.nothing()

    async def as_coroutine(self) -> Any:
        return await self.begin()

    async def several(self) -> Taken:
        """Post several receives of one sender and tag at once, and cancel some of them."""
        handles: list[Any] = [self.begin() for _ in range(self.chance.randrange(1, 6))]
        await pause(self.chance)
        kept = self.chance.randrange(1 + len(handles))
        for handle in self.chance.sample(handles, len(handles) - kept):
            if self.chance.random() < 0.3:
                await pause(self.chance)
            handle.cancel()
        while sum(handle.done() and not handle.cancelled() for handle in handles) < self.books.left:
            waiting = [handle for handle in handles if not handle.done()]
            if not waiting:
                break
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for handle in handles:  # those for which no message is left
            handle.cancel()
        taken: Taken = []
        for handle in handles:
            if not handle.cancelled():
                taken += self.taken(handle.result())
        return taken


async def once(links: str, messages: int, chance: Random) -> Counter[str]:
    """One world; messages and attempts."""
    found: Counter[str] = Counter()
    flows = plan(chance, messages, blocking=False)
    async with world(links) as comms:
        groups = await asyncio.gather(*(comm.group([0, 1, 2], "inner") for comm in comms))
        async with asyncio.TaskGroup() as tasks:
            takers = []
            for flow in flows:
                among = groups if flow.in_group else comms
                takers.append(tasks.create_task(Taker(among[0], flow, Random(chance.random())).run()))
                for source in flow.sources:
                    tasks.create_task(send_all(among[source], flow, Random(chance.random())))
        for task in takers:
            count(found, task.result())
    return found


def count(found: Counter[str], books: Books) -> None:
    """Add a flow that is complete."""
    found["messages"] += sum(books.next.values())
    found["attempts"] += books.attempts
    found["amid"] += books.amid
    found["large"] += sum(books.next.values()) if books.flow.elements == LARGE else 0


# ---------------------------------------------------------------- blocking


class BlockingTaker(Taker):
    """The same on a blocking communicator; ``run`` with ``run_blocking``."""

    def run_blocking(self) -> Books:
        """Until all have come."""
        while self.books.left:
            self.books.enter(self.chance.choice([self.call_polled, self.call_handle])())
        return self.books

    def call_polled(self) -> Taken:
        try:
            return self.taken(self.receive(self.soon_s()))
        except CollectiveTimeout:
            return self.nothing()

    def call_handle(self) -> Taken:
        handle = self.handle()
        try:
            return self.taken(handle.wait(self.soon_s()))
        except (TimeoutError, CollectiveTimeout):
            handle.cancel()
        try:
            return self.taken(handle.wait())
        except NotWanted:
            return self.nothing()

    def receive(self, timeout_s: float) -> Any:
        """A blocking call."""
        source, tag = self.source, self.flow.tag
        if self.queue is not None:
            return self.queue.get(timeout=timeout_s)
        if self.flow.form == "object":
            return self.comm.recv_object(source, tag, timeout=timeout_s)
        if self.flow.form == "any":
            return self.comm.recv_any(tag=tag, timeout=timeout_s)
        return self.comm.recv(source, tag, out=self.out if self.flow.form == "out" else None, timeout=timeout_s)

    def handle(self) -> Any:
        """One that is begun."""
        source, tag = self.source, self.flow.tag
        if self.queue is not None:
            return self.queue.get_async()
        if self.flow.form == "object":
            return self.comm.recv_object_async(source, tag)
        if self.flow.form == "any":
            return self.comm.recv_any_async(tag=tag)
        if self.again is not None:
            return self.again.start()
        return self.comm.recv_async(source, tag, out=self.out if self.flow.form == "out" else None)


def send_blocking(comm: Any, flow: Flow, chance: Random) -> None:
    """The messages of one sender."""
    queue = comm.queue(flow.tag, comm.rank, 0) if flow.form == "queue" else None
    for number in range(flow.count):
        if queue is not None:
            queue.put(payload(flow, number))
        elif flow.form == "object":
            comm.send_object(number, 0, flow.tag)
        else:
            comm.send(payload(flow, number), 0, flow.tag, synchronous=chance.random() < 0.5)
        if flow.is_slow or chance.random() < 0.1:
            time.sleep(chance.random() * SOON_S)


def once_blocking(links: str, messages: int, chance: Random) -> Counter[str]:
    """One world of blocking communicators, each flow on threads of its own."""
    found: Counter[str] = Counter()
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
            raise

    with joined(links, 3) as comms:
        for comm in comms:
            comm.set_timeout(HANG_S)
        takers, threads = [], []
        for flow in plan(chance, messages, blocking=True):
            taker = BlockingTaker(comms[0], flow, Random(chance.random()))
            takers.append(taker)
            calls: list[Callable[[], object]] = [taker.run_blocking]
            for source in flow.sources:
                a_chance = Random(chance.random())
                calls.append(lambda source=source, flow=flow, c=a_chance: send_blocking(comms[source], flow, c))
            threads += [threading.Thread(target=guarded, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for taker in takers:
            count(found, taker.books)
    return found


def main() -> int:
    """Search for so many seconds, or so many messages."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.receives")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--messages", type=int, help="in place of the seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--links", action="append", choices=LINKS, help="again for more of them; default: all")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    chance, until_s = Random(given.seed), time.monotonic() + given.seconds
    total: Counter[str] = Counter()
    by_links: Counter[str] = Counter()
    while total["messages"] < given.messages if given.messages else time.monotonic() < until_s:
        links = min(given.links or LINKS, key=lambda one: (by_links[one], chance.random()))
        messages = min(1200, given.messages or 600)
        seed = chance.randrange(1 << 31)
        try:
            if links.startswith("blocking"):
                found = once_blocking(links.removeprefix("blocking "), messages, Random(seed))
            else:
                found = asyncio.run(once(links, messages, Random(seed)))
        except BaseException:
            click.echo(f"after {total['messages']} messages, over {links}, in the world of seed {seed}:")
            raise
        total += found
        by_links[links] += found["messages"]
    click.echo(f"{dict(by_links)}")
    how = f"by {total['attempts']} attempts ({total['amid']} have left a message)"
    click.echo(f"{total['messages']} messages ({total['large']} of 800 KB) {how}: 0 lost, 0 twice, order kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
