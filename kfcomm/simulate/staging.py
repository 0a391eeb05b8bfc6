"""Calls of device memory on their way through the host: copies before and after, as ``collectives.on_device.staged``.

A call is cut into segments as there. Of each, in turn, a rank copies its input to the host, posts the collective, and
copies the result back; so many segments of a call are under way at a time. Copies of one rank follow each other in each
direction, and directions do not disturb each other (on an H100 both together took 1.14 times as long as one:
``bench/results/gpu-2026-11-26.json``). Not simulated: the Python work for a segment, and NCCL, which carries out calls
among the devices of one host and the inner part of calls between hosts that have several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.collectives.on_device.segments import SEGMENT_NBYTES
from kfcomm.collectives.on_device.staged import WINDOW
from kfcomm.collectives.specs import SPECS
from kfcomm.simulate.ports import Agenda
from kfcomm.simulate.workload import Call
from kfcomm.types import Verb

_ROOT_SENDS: Final = (Verb.BROADCAST,)
_ROOT_RECEIVES: Final = (Verb.REDUCE, Verb.GATHER)
_GATHERING: Final = (Verb.GATHER, Verb.ALL_GATHER)


@dataclass(frozen=True, slots=True)
class Segments:
    """Calls as they are posted, and which of them make up each call of the workload."""

    posted: tuple[Call, ...]
    of_call: tuple[range, ...]  # numbers of those that were posted

    @classmethod
    def of(cls, calls: Sequence[Call], device: float | None) -> Self:
        """Cut calls, if their arrays are in device memory."""
        posted: list[Call] = []
        of_call = []
        for call in calls:
            parts = [call] if device is None else list(_cut(call))
            of_call.append(range(len(posted), len(posted) + len(parts)))
            posted += parts
        return cls(tuple(posted), tuple(of_call))


class DeviceCopies:
    """Copies between one rank's device and its host, at ``rate`` bytes per second in each direction."""

    __slots__ = ("_agenda", "_free_s", "_rate")

    def __init__(self, agenda: Agenda, rate: float) -> None:
        self._agenda = agenda
        self._rate = rate
        self._free_s = {"in": 0.0, "out": 0.0}

    def copy(self, way: str, nbytes: float, then: Callable[[Any], None], what: Any) -> None:
        """Call ``then(what)`` when a copy, which begins when those before it are done, is complete."""
        begin_s = max(self._agenda.now_s, self._free_s[way])
        self._free_s[way] = end_s = begin_s + nbytes / self._rate
        self._agenda.at(end_s, then, what)


class StagedCall:
    """One call of device memory on one rank; ``ended`` is called when its result is on the device."""

    __slots__ = ("_begun", "_copies", "_ended", "_held", "_left", "_post", "_segments", "_sizes")

    def __init__(
        self, copies: DeviceCopies, segments: range, sizes: Sequence[tuple[float, float]],
        post: Callable[[int], None], ended: Callable[[], None],
    ) -> None:  # fmt: skip
        self._copies = copies
        self._segments = segments
        self._sizes = sizes  # bytes of each segment that are copied to the host, and back
        self._post = post
        self._ended = ended
        self._begun = self._held = 0
        self._left = len(segments)

    def begin(self) -> None:
        """Copy further segments to the host, up to the size of the window."""
        while self._begun < len(self._segments) and self._held < WINDOW:
            number = self._segments[self._begun]
            self._begun += 1
            self._held += 1
            self._copies.copy("out", self._sizes[number - self._segments[0]][0], self._post, number)

    def done(self, number: int) -> None:
        """Copy the result of a segment back."""
        self._copies.copy("in", self._sizes[number - self._segments[0]][1], self._over, number)

    def _over(self, _: int) -> None:
        self._held -= 1
        self._left -= 1
        if self._left:
            self.begin()
        else:
            self._ended()


def copied(call: Call, rank: int, size: int) -> tuple[float, float]:
    """Bytes that a rank copies to the host for a call, and back."""
    verb = Verb(call.verb)
    out = call.nbytes if verb not in _ROOT_SENDS or rank == call.root else 0
    into = call.nbytes * size if verb in _GATHERING else call.nbytes
    if verb is Verb.REDUCE_SCATTER:
        return out, into / size
    return out, into if verb not in _ROOT_RECEIVES or rank == call.root else 0


def _cut(call: Call) -> Iterator[Call]:
    """The segments of a call, as ``on_device.segments.cut`` has them."""
    itemsize = dtype_of(call.dtype).itemsize
    if not SPECS[Verb(call.verb)].is_elementwise:
        yield call
        return
    total, each = call.nbytes // itemsize, SEGMENT_NBYTES // itemsize
    number = max(1, (total + each // 2) // each)
    for at in range(number):
        count = each if at + 1 < number else total - each * (number - 1)
        yield replace(call, nbytes=count * itemsize)
