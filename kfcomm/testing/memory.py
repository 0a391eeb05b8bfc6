"""Memory of a fake device: what is in it, and whether those who use it have waited for each other.

An *allocation* remembers who read and wrote it. Two streams that touch the same bytes, one of them writing, must be in
an order that somebody made: by a mark between them, or by a program that was told of the end of the one before it began
the other. Where they are in order by luck alone, as everything is on a fake that holds nothing back, that is said.

New memory, and memory whose contents are void, is *poisoned*: NaN, or 0x5A in every byte, so that a result that is read
before it is written does not look like one.

This module must not know what is done to the memory, nor on which device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kfcomm.arrays.devices import Array
from kfcomm.testing.streams import FakeStream

POISON = 0x5A


@dataclass(frozen=True, slots=True)
class Use:
    """Access of a stream to some bytes of an allocation, at one of its ticks."""

    stream: FakeStream
    tick: int
    start: int
    stop: int
    writes: bool


class Allocation:
    """Some memory of a device, which is free again when the last array in it is gone.

    Attributes:
        nbytes: of all of it.
        home: the stream for which it was made.
    """

    def __init__(self, base: Array, home: FakeStream) -> None:
        self.nbytes = base.nbytes
        self.home = home
        self._at = byte_bounds(base)[0]
        self._uses: list[Use] = []

    def touch(self, memory: Array, stream: FakeStream, *, writes: bool) -> str | None:
        """``stream`` reads or writes ``memory``, which lies in this allocation; under the lock of the scheduler.

        What is not contiguous is taken to reach from its first byte to its last.

        Returns:
            With whom it is not in order, in words, if there is one.
        """
        if not memory.size:
            return None
        low, high = byte_bounds(memory)
        use = Use(stream, stream.tick(), low - self._at, high - self._at, writes)
        others = [one for one in self._uses if one.start < use.stop and use.start < one.stop]
        wrong = next((one for one in others if _is_race(one, use)), None)
        # Whoever comes after a write, in order, comes after all that the write came after.
        self._uses = [one for one in self._uses if not _is_covered(one, use)] + [use]
        if wrong is None:
            return None
        did, does = ("wrote" if wrong.writes else "read"), ("writes" if writes else "reads")
        return f"{stream} {does} memory that {wrong.stream} {did}, and has not waited for it"


def _is_race(before: Use, now: Use) -> bool:
    if before.stream is now.stream or not (before.writes or now.writes):
        return False
    return now.stream.known.get(before.stream, 0) < before.tick


def _is_covered(before: Use, now: Use) -> bool:
    inside = now.start <= before.start and before.stop <= now.stop
    return inside and (now.writes or (before.stream is now.stream and not before.writes))


def poison(memory: Array) -> None:
    """Make it plain that nothing has been written here."""
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
