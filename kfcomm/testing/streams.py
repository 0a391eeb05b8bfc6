"""Streams of work without a device and without threads: the execution of `kfcomm.testing.FakeDevice`.

A stream is a queue of items. An item is done as soon as everything before it and every mark that it waits for is done:
in whichever thread made that possible, before the call that did so returns. So a stream that is not held back is always
empty, and a test that holds one back sees the exact state of the rest of the program meanwhile.

Invariants: items are done under one lock, `SCHEDULER`, which all fake devices of the process share because a
collective joins any of them. Calls promised to ``notify`` are made outside of it, by one thread at a time for each
device, in the order of the device. An item that fails fails its stream: items behind it are passed without being done,
and a stream that waits for a mark behind it fails with it, as a device's context does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kfcomm.arrays.devices import Array

Promise = Callable[[BaseException | None], None]
Known: TypeAlias = "dict[FakeStream, int]"
"""Known progress of streams: the latest tick of each."""


def learn(known: Known, more: Known) -> None:
    """Merge into what is known."""
    for stream, tick in more.items():
        if tick > known.get(stream, 0):
            known[stream] = tick


Item: TypeAlias = "Callable[[FakeStream], bool]"
"""Something on a stream: does it, now that it is first there, and returns whether it is done; under the lock.

If it is not, somebody will ``wake`` the stream when it may be, and it is called again.
"""


class Promises:
    """Promises of one device to ``notify``."""

    def __init__(self) -> None:
        self.num_open = 0  # calls that have not come
        # how far the program has been told that the streams are; replaced, not changed, since items keep it
        self.told: Known = {}
        self._due: deque[tuple[Promise, BaseException | None, Known]] = deque()
        self._is_speaking = False

    def put(self, done: Promise, error: BaseException | None, known: Known) -> None:
        """Add a due call; under the lock."""
        self._due.append((done, error, known))
        SCHEDULER.speakers.append(self)

    def tell(self, known: Known) -> None:
        """Note what the program knows of the progress of streams; under the lock."""
        self.told = dict(self.told)
        learn(self.told, known)

    def keep(self) -> None:
        """Call what is due, outside of the lock."""
        while True:
            with SCHEDULER.lock:
                # A thread that finds another at it leaves the rest to that one: so the calls keep their order.
                if self._is_speaking or not self._due:
                    return
                self._is_speaking = True
                done, error, known = self._due.popleft()
                self.tell(known)
            try:
                done(error)
            finally:
                with SCHEDULER.lock:
                    self._is_speaking = False
                    self.num_open -= 1
                    SCHEDULER.quiet.notify_all()


class Scheduler:
    """One lock for all fake devices, and the work to finish before it is released."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.quiet = threading.Condition(self.lock)
        self.awake: deque[FakeStream] = deque()
        self.speakers: deque[Promises] = deque()
        self._depth = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the lock for a change; at its end, do all work that has become possible, and make the due calls."""
        speakers: list[Promises] = []
        with self.lock:
            self._depth += 1
            try:
                yield
            finally:
                # Only in the outermost block: an item that is done may enter it again.
                if self._depth == 1:
                    while self.awake:
                        self.awake.popleft().advance()
                    speakers += self.speakers
                    self.speakers.clear()
                self._depth -= 1
        # After the lock is released: what is called may wait for other threads.
        for promises in speakers:
            promises.keep()


SCHEDULER: Final = Scheduler()
"""Of all fake devices of this process. Between calls there is nothing in it."""


class FakeMark:
    """A place in a stream."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.is_done = False  # with everything before it
        # of the stream, when it came to the mark
        self.error: BaseException | None = None
        self.known: Known = {}
        self._waiting: list[FakeStream] = []

    def attempt(self, stream: FakeStream) -> bool:
        """Note that the stream has come here, and wake the streams that wait for it."""
        self.is_done, self.error, self.known = True, stream.error, dict(stream.known)
        for one in self._waiting:
            one.wake()
        self._waiting.clear()
        return True

    def passed(self, stream: FakeStream) -> bool:
        """Whether ``stream`` may pass a wait for it; else the stream is woken when it may."""
        if not self.is_done:
            self._waiting.append(stream)
            return False
        learn(stream.known, self.known)
        stream.error = stream.error or self.error
        return True

    def __repr__(self) -> str:
        return f"<FakeMark on {self.stream}, {'done' if self.is_done else 'not done'}>"


class FakeStream:
    """A queue of work of one fake device. Made by ``FakeDevice.stream``.

    Attributes:
        device: whose it is.
        promises: of the device.
        name: for messages.
        is_urgent: as asked for.
        error: why an item of it failed, if one did.
        is_held: nothing on it is done.
        is_capturing: a graph is being captured from it.
        known: how far it knows the streams to be, itself included.
    """

    def __init__(self, device: Any, promises: Promises, name: str, *, is_urgent: bool = False) -> None:
        self.device = device
        self.promises = promises
        self.name = name
        self.is_urgent = is_urgent
        self.error: BaseException | None = None
        self.is_held = False
        self.is_capturing = False
        self.known: Known = {}
        self._items: deque[tuple[Item, Known]] = deque()
        self._is_advancing = False

    @property
    def num_waiting(self) -> int:
        """Items on it that are not done, marks and waits included."""
        return len(self._items)

    def add(self, item: Item) -> None:
        """Put an item behind all others."""
        with SCHEDULER.entered():
            self._items.append((item, self.promises.told))
            self.wake()

    # A stream knows how far the others have come from the marks that it has waited for, and from what the program had
    # been told by ``notify`` when it put an item there: more may be done, but nothing promises it.

    def tick(self) -> int:
        """Number of the item that is done now on this stream."""
        number = self.known[self] = self.known.get(self, 0) + 1
        return number

    def wake(self) -> None:
        """Check again whether the first item is possible; under the lock."""
        SCHEDULER.awake.append(self)

    def advance(self) -> None:
        """Do the possible items; under the lock."""
        if self._is_advancing:  # by the item itself, which has put something on its own stream
            return
        self._is_advancing = True
        try:
            while self._items and not self.is_held:
                item, told = self._items[0]
                learn(self.known, told)
                if not item(self):
                    break
                self._items.popleft()
        finally:
            self._is_advancing = False

    def hold(self, held: bool) -> None:
        """Hold back its items, or release them."""
        with SCHEDULER.entered():
            self.is_held = held
            self.wake()

    def __repr__(self) -> str:
        return f"<FakeStream {self.name}>"


def work(function: Callable[[], object]) -> Item:
    """A function to be called; skipped where the stream has failed."""

    def attempt(stream: FakeStream) -> bool:
        if stream.error is None:
            try:
                function()
            except Exception as error:  # noqa: BLE001  as a kernel's error: it is seen by whoever waits for the stream
                stream.error = error
        return True

    return attempt


def notify(done: Promise) -> Item:
    """A call that is promised, by the device of the stream."""

    def attempt(stream: FakeStream) -> bool:
        stream.promises.put(done, stream.error, dict(stream.known))
        return True

    return attempt


POISON = 0x5A


@dataclass(frozen=True, slots=True)
class StreamUse:
    """Access of a stream to some bytes of an allocation, at one of its ticks."""

    stream: FakeStream
    tick: int
    start: int
    stop: int
    writes: bool


# Two streams that touch the same bytes, one of them writing, must be in an order that somebody made: by a mark between
# them, or by a program that was told of the end of the one before it began the other. Where they are in order by luck
# alone, as everything is on a fake that holds nothing back, a real device would now and then give wrong numbers: so an
# allocation remembers each use, and compares it with what the next stream knows.


class Allocation:
    """Some memory of a device, which is free again when the last array in it is gone."""

    def __init__(self, base: Array, home: FakeStream) -> None:
        self.nbytes = base.nbytes
        self.home = home  # the stream for which it was made
        self._at = byte_bounds(base)[0]
        self._uses: list[StreamUse] = []

    def touch(self, memory: Array, stream: FakeStream, *, writes: bool) -> str | None:
        """Note a use of ``memory``, which lies here, under the lock; return a race that it makes, in words."""
        if not memory.size:
            return None
        # Memory that is not contiguous counts from its first byte to its last.
        low, high = byte_bounds(memory)
        use = StreamUse(stream, stream.tick(), low - self._at, high - self._at, writes)
        others = [one for one in self._uses if one.start < use.stop and use.start < one.stop]
        wrong = next((one for one in others if _is_race(one, use)), None)
        # A use that is in order after a write is in order after everything that the write came after.
        self._uses = [one for one in self._uses if not _is_covered(one, use)] + [use]
        if wrong is None:
            return None
        did, does = ("wrote" if wrong.writes else "read"), ("writes" if writes else "reads")
        return f"{stream} {does} memory that {wrong.stream} {did}, and has not waited for it"


def _is_race(before: StreamUse, now: StreamUse) -> bool:
    if before.stream is now.stream or not (before.writes or now.writes):
        return False
    return now.stream.known.get(before.stream, 0) < before.tick


def _is_covered(before: StreamUse, now: StreamUse) -> bool:
    inside = now.start <= before.start and before.stop <= now.stop
    return inside and (now.writes or (before.stream is now.stream and not before.writes))


def poison(memory: Array) -> None:
    """Fill with NaN, or 0x5A in every byte, so that a result read before it is written does not look like one."""
    if memory.dtype.kind == "b":
        memory[...] = True
    else:
        is_float = memory.dtype.kind in "fc" or memory.dtype.name == "bfloat16"
        raw = memory.view(np.uint8)
        raw[...] = 0xFF if is_float else POISON  # all bits set are a NaN in every format of numbers with a point


class Alive:
    """Bytes allocated and still in use."""

    def __init__(self) -> None:
        self._all: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._count = 0

    def add(self, thing: Any) -> None:
        """Something with ``nbytes``."""
        self._count += 1
        self._all[self._count] = thing

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(thing.nbytes for thing in list(self._all.values()))
