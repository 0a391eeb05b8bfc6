"""Two ends of shared-memory links in one process, with a hub each as in two."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select

from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.hub import Hub
from kfcomm.transports.shm.link import LinkParts
from kfcomm.transports.shm.receiver import ShmReceiver
from kfcomm.transports.shm.ring import SHARED_NBYTES, Shared
from kfcomm.transports.shm.segment import Arena, attach, create, pieces_in
from kfcomm.transports.shm.sender import ShmSender
from tests.transports.streams import Notes, Owner, chunk, noise

MIB = 1 << 20
HALF = noise(MIB // 2)


def segments():
    """A segment of a link, mapped twice."""
    descriptor, mapping = create("kfcomm-link", SHARED_NBYTES)
    try:
        return Shared(mapping), Shared(attach(descriptor, SHARED_NBYTES, writable=True))
    finally:
        os.close(descriptor)


def never():
    """Nothing is in flight: then no timer wakes a hub."""
    return False


class NoSlots:
    """Nothing is carried out in slots."""

    pending = ()

    def look(self):
        return False

    def park(self):
        pass

    def unpark(self):
        pass


class Process:
    """One side of links: a reactor that a loop drives, a hub, an arena, and the notes of each link.

    Attributes:
        hub, arena: as `ShmEndpoint` has them.
    """

    def __init__(self, loop, *, slabs=16, is_waiting=never):
        self.reactor = Reactor()
        self.driver = LoopDriver(self.reactor, loop, looks=1)
        self.hub = Hub(self.reactor, is_waiting, NoSlots())
        self.arena = Arena(slabs)

    def close(self):
        self.hub.close()
        self.driver.close()
        self.arena.close()


class Pair:
    """A link from one process to another.

    Attributes:
        link, notes: the publisher, and what it hears.
        other, heard: the subscriber, and what it hears.
        words: the control words, as the subscriber's process has them mapped.
    """

    def __init__(self, here, there, *, max_lent=8, peers=(1, 0), notes=Notes):
        near, far = segments()
        arena = pieces_in(attach(here.arena.descriptor, here.arena.nbytes, writable=False))
        self.notes, self.heard = notes(), notes()
        self.link = ShmSender(
            LinkParts(there.hub.bell.address, here.reactor, self.notes, peers[0], near, here.hub), here.arena
        )
        self.other = ShmReceiver(
            LinkParts(here.hub.bell.address, there.reactor, self.heard, peers[1], far, there.hub), arena, max_lent
        )
        self.words, self.shared = far.words, far
        here.hub.add(self.link)
        there.hub.add(self.other)

    async def ended(self):
        """Wait until both ends have been reported."""
        await self.notes.until(lambda notes: notes.ends)
        await self.heard.until(lambda heard: heard.ends)

    async def close(self):
        """End what has not."""
        self.link.abort()
        self.other.abort()
        await self.ended()


@contextlib.asynccontextmanager
async def processes(*, slabs=16, is_waiting=never):
    """Two sides on one loop, without links yet."""
    loop = asyncio.get_running_loop()
    here, there = Process(loop, slabs=slabs, is_waiting=is_waiting), Process(loop, is_waiting=is_waiting)
    try:
        yield here, there
    finally:
        here.close()
        there.close()


@contextlib.asynccontextmanager
async def linked(*, slabs=16, max_lent=8):
    """A link from one side to another; at the end both ends have been reported once."""
    async with processes(slabs=slabs) as (here, there):
        pair = Pair(here, there, max_lent=max_lent)
        try:
            yield pair
        finally:
            await pair.close()
            assert len(pair.notes.ends) == len(pair.heard.ends) == 1


async def parked(*hubs):
    """Turns of the loop until these hubs rest."""
    while any(hub.is_awake for hub in hubs):  # noqa: ASYNC110  a hub that goes to rest tells nobody
        await asyncio.sleep(0)


async def turns(count=20):
    """So many turns of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


class Threads:
    """Two loops that a test steps one callback at a time, in any interleaving, down to what lies around a fence.

    Each drives a reactor. A side is never entered twice. Timers do not fire: nothing here may depend on the backstop.
    """

    def __init__(self, choose):
        self.choose = choose
        self.sides = (Loop(self), Loop(self))

    def step(self, side):
        """One callback of a side; whether there was one."""
        loop = self.sides[side]
        return not loop.busy and loop.step()

    def run_side(self, side):
        """One side, until it rests; whether it did anything."""
        moved = False
        while self.step(side):
            moved = True
        return moved

    def run(self, *, in_turns=False):
        """Both, until nothing is left to do; ``in_turns``: each goes to rest before the other begins."""
        step = self.run_side if in_turns else self.step
        while step(0) | step(1):
            pass

    def interleave(self, side, thing, name):
        """Let the other side have some turns before and after this side calls that method of a thing."""
        method = getattr(thing, name)

        def others():
            for _ in range(self.choose()):
                self.step(1 - side)

        @contextlib.contextmanager
        def entered():
            others()
            with method:
                yield
            others()

        def called(*arguments):
            others()
            result = method(*arguments)
            others()
            return result

        setattr(thing, name, called if callable(method) else _Entered(entered))


class _Entered:
    """A context that is entered anew each time."""

    def __init__(self, make):
        self.make = make

    def __enter__(self):
        self.now = self.make()
        self.now.__enter__()

    def __exit__(self, *error):
        self.now.__exit__(*error)


class Loop:
    """As much of an event loop as a driver uses."""

    def __init__(self, threads):
        self.threads = threads
        self.busy = False
        self.ready = []
        self.readers = {}

    def call_soon(self, callback, *arguments):
        self.ready.append((callback, arguments))

    def call_later(self, delay_s, callback, *arguments):
        return Timer()

    def add_reader(self, descriptor, callback):
        self.readers[descriptor] = callback

    def remove_reader(self, descriptor):
        del self.readers[descriptor]

    def do(self, callback, *arguments):
        """A callback of the program."""
        self.busy = True
        try:
            return callback(*arguments)
        finally:
            self.busy = False

    def step(self):
        if self.ready:
            callback, arguments = self.ready.pop(0)
            self.do(callback, *arguments)
            return True
        for descriptor, callback in list(self.readers.items()):
            if _readable(descriptor):
                self.do(callback)
                return True
        return False


class Timer:
    def cancel(self):
        pass


def _readable(descriptor):
    return bool(select.select([descriptor], [], [], 0)[0])


def fill(link, owner=None):
    """Send until a chunk has to wait, which is withdrawn; the number of those that need not."""
    count = 0
    while link.send(chunk(count), memoryview(HALF), filler := Owner()):
        count += 1
    assert link.withdraw(filler) == [chunk(count)]
    return count


async def settled(pair):
    """Wait until nothing of the arena is in use."""
    while pair.link._arena.pieces_in_use:
        pair.link._keeper.wake()
        await asyncio.sleep(0)
