"""Progress of one rank through a workload, in virtual time: it computes, posts its calls, and waits for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, assert_never

from kfcomm.simulate.ports import Agenda
from kfcomm.simulate.ranks import Rank
from kfcomm.simulate.staging import DeviceCopies, Segments, StagedCall, copied
from kfcomm.simulate.workload import Await, Call, Compute, Item, calls_of


class Script:
    """One rank and its workload.

    Args:
        agenda: virtual time.
        rank: which posts the calls.
        items: the workload.
        segments: of its calls.
        copies: of the rank's device, if arrays are in device memory.

    Attributes:
        ended_s: when it was through the workload, calls that it does not wait for aside.
        posted_s: when each call was posted.
        computed_s: begin and end of each compute.
    """

    __slots__ = (
        "_agenda", "_at", "_awaited", "_delayed", "_done_s", "_items", "_numbers", "_owners", "_rank", "_segments",
        "_stagings", "computed_s", "ended_s", "posted_s",
    )  # fmt: skip

    def __init__(
        self, agenda: Agenda, rank: Rank, items: Sequence[Item], segments: Segments, copies: DeviceCopies | None
    ) -> None:
        self._agenda = agenda
        self._rank = rank
        self._items = items
        self._segments = segments
        self._numbers = {call.name: number for number, call in enumerate(calls_of(items)) if call.name}
        self._at = 0
        self._awaited: set[int] = set()  # calls for which it stands still
        self._delayed: dict[int, set[int]] = {}  # calls to be posted, and those that they come after
        self._done_s: dict[int, float] = {}  # of calls of device memory
        self.posted_s: list[float] = []
        self.computed_s: list[tuple[float, float]] = []
        self.ended_s: float | None = None
        self._stagings = [] if copies is None else list(self._staged(copies))
        self._owners = [number for number, parts in enumerate(segments.of_call) for _ in parts]
        waits = any(isinstance(item, Await) or (isinstance(item, Call) and item.after) for item in items)
        if waits or self._stagings:
            rank.on_done = self._segment_done

    def done_s(self, number: int) -> float | None:
        """Time at which a call is complete; None while that is unknown."""
        return self._done_s.get(number) if self._stagings else self._rank.calls[number].done_s

    def go_on(self, _: Any = None) -> None:
        """Do what comes next, until it takes time."""
        while self._at < len(self._items):
            item = self._items[self._at]
            self._at += 1
            match item:
                case Compute(seconds):
                    end_s = self._agenda.now_s + seconds
                    self.computed_s.append((self._agenda.now_s, end_s))
                    if seconds:
                        self._agenda.at(end_s, self.go_on, None)
                        return
                case Call():
                    self._call(item)
                case Await(names):
                    numbers = [self._numbers[name] for name in names]
                    self._awaited = self._missing(numbers or range(len(self.posted_s)))
                    if self._awaited:
                        return
                case _:
                    assert_never(item)
        self.ended_s = self._agenda.now_s

    def _call(self, call: Call) -> None:
        number = len(self.posted_s)
        self.posted_s.append(math.inf)
        missing = self._missing([self._numbers[name] for name in call.after])
        if missing:
            self._delayed[number] = missing
        else:
            self._post(number)

    def _post(self, number: int) -> None:
        self.posted_s[number] = self._agenda.now_s
        if self._stagings:
            self._stagings[number].begin()
        else:
            self._rank.post(number)

    def _missing(self, numbers: Sequence[int]) -> set[int]:
        now_s = self._agenda.now_s
        # A call whose last work is under way has its end in the future.
        return {at for at in numbers if (done_s := self.done_s(at)) is None or done_s > now_s}

    def _segment_done(self, segment: int) -> None:
        number = self._owners[segment]
        if self._stagings:
            self._stagings[number].done(segment)
        else:
            self._done(number)

    def _done(self, number: int) -> None:
        for delayed, missing in list(self._delayed.items()):
            missing.discard(number)
            if not missing:
                del self._delayed[delayed]
                self._post(delayed)
        if number in self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self.go_on()

    def _staged(self, copies: DeviceCopies) -> Iterator[StagedCall]:
        posted, size = self._segments.posted, self._rank.size
        for number, parts in enumerate(self._segments.of_call):
            sizes = [copied(posted[part], self._rank.number, size) for part in parts]
            yield StagedCall(copies, parts, sizes, self._rank.post, partial(self._copied, number))

    def _copied(self, number: int) -> None:
        self._done_s[number] = self._agenda.now_s
        self._done(number)
