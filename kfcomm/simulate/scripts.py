"""Progress of one rank through a workload, in virtual time: it computes, posts its calls, and waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from kfcomm.simulate.ports import Agenda
from kfcomm.simulate.ranks import Rank
from kfcomm.simulate.workload import Await, Call, Compute, Item


class Script:
    """One rank and its workload; ``ended_s`` is when it was through, calls that it does not wait for aside."""

    __slots__ = ("_agenda", "_at", "_awaited", "_delayed", "_items", "_next_call", "_numbers", "_rank", "ended_s")

    def __init__(self, agenda: Agenda, rank: Rank, items: Sequence[Item], numbers: Mapping[str, int]) -> None:
        self._agenda = agenda
        self._rank = rank
        self._items = items
        self._numbers = numbers  # of calls, by name
        self._at = self._next_call = 0
        self._awaited: set[int] = set()  # calls for which it stands still
        self._delayed: dict[int, set[int]] = {}  # calls to be posted, and those that they come after
        self.ended_s: float | None = None
        if any(isinstance(item, Await) or (isinstance(item, Call) and item.after) for item in items):
            rank.on_done = self._done

    def go_on(self, _: Any = None) -> None:
        """Do what comes next, until it takes time."""
        while self._at < len(self._items):
            item = self._items[self._at]
            self._at += 1
            match item:
                case Compute(seconds):
                    if seconds:
                        self._agenda.at(self._agenda.now_s + seconds, self.go_on, None)
                        return
                case Call():
                    self._post(item)
                case Await(names):
                    self._awaited = self._missing([self._numbers[name] for name in names] or range(self._next_call))
                    if self._awaited:
                        return
                case _:
                    assert_never(item)
        self.ended_s = self._agenda.now_s

    def _post(self, call: Call) -> None:
        number = self._next_call
        self._next_call += 1
        missing = self._missing([self._numbers[name] for name in call.after])
        if missing:
            self._delayed[number] = missing
        else:
            self._rank.post(number)

    def _missing(self, numbers: Sequence[int]) -> set[int]:
        now_s, calls = self._agenda.now_s, self._rank.calls
        # A call whose last work is under way has its end in the future.
        return {at for at in numbers if (done_s := calls[at].done_s) is None or done_s > now_s}

    def _done(self, number: int) -> None:
        for delayed, missing in list(self._delayed.items()):
            missing.discard(number)
            if not missing:
                del self._delayed[delayed]
                self._rank.post(delayed)
        if number in self._awaited:
            self._awaited.discard(number)
            if not self._awaited:
                self.go_on()
