"""Connections between the control planes of one epoch in virtual time.

What a rank says to all others reaches all that live, or none: they pass it on to each other. So of one that dies what
was under way may be lost, but not for some only.
"""

from __future__ import annotations

from collections.abc import Sequence

from kfcomm.core.heartbeat import BEATS
from kfcomm.engine.control.base import ControlEvents
from kfcomm.engine.control.memory import MemoryHub, News
from kfcomm.testing.virtual.network import NetworkModel
from kfcomm.transports.reactor import Callback
from kfcomm.types import override

LAST_WORDS_LOST = 0.5
"""So often what a rank that dies has said, and nobody has heard yet, is not heard any more."""


class _Said:
    """News for all others."""

    __slots__ = ("is_heard", "news")

    def __init__(self, news: News, *, is_heard: bool) -> None:
        self.news = news
        self.is_heard = is_heard

    def __call__(self, events: ControlEvents) -> None:
        self.news(events)


class VirtualHub(MemoryHub):
    """Control planes of one epoch, with latencies and lost messages."""

    def __init__(self, model: NetworkModel, births: Sequence[int]) -> None:
        super().__init__(len(births))
        self._model = model
        self._births = births
        self._silenced: set[int] = set()
        self._knows: set[int] = set()
        self._goodbyes: dict[int, _Said] = {}
        for one, other in sorted(model.lost):
            if one < other:
                self.lose(one, other)

    @override
    def kill(self, rank: int) -> None:
        if self._model.random.random() < LAST_WORDS_LOST:
            self._silenced.add(rank)
            if rank in self._goodbyes and not self._goodbyes[rank].is_heard:
                self.left.discard(rank)  # so it is lost
        super().kill(rank)

    @override
    def tell_others(self, rank: int, news: News, about: int | None = None) -> None:
        source = rank if about is None else about
        is_heard = source in self._silenced or bool(self._early.keys() - {rank})
        said = _Said(news, is_heard=is_heard)
        if rank in self.left:
            self._goodbyes.setdefault(rank, said)
        super().tell_others(rank, said, about)

    @override
    def carry(self, source: int, target: int, deliver: Callback, *arguments: object) -> None:
        road = self._births[source], self._births[target]
        self._model.carry(*road, "news", self._arrived, source, deliver, arguments)

    def ended(self, birth: int) -> None:
        """An initial rank that has not entered this epoch by now never will: its port refuses connections."""
        if birth in self._births and self._births.index(birth) in self._early:
            self.declare_lost(self._births.index(birth), "its process has ended", has_ended=True)

    def lose(self, one: int, other: int, *, stopped: int | None = None) -> None:
        """Each of two ranks of the beginning finds out that it has lost the other; one that was stopped, of itself."""
        if one in self._births and other in self._births:
            for birth, peer in ((one, other), (other, one)):
                self._find_out(self._births.index(birth), self._births.index(peer), was_stopped=birth == stopped)

    def _find_out(self, rank: int, peer: int, *, was_stopped: bool) -> None:
        lost_after_s = self._model.timing.lost_after_s

        def news(events: ControlEvents) -> None:
            if was_stopped and rank not in self._knows:
                self._knows.add(rank)
                events.on_peer_lost(rank, "it was stopped")
            events.on_peer_lost(peer, f"nothing was heard of it for {lost_after_s:g} s")
            self.planes[rank].let_go(peer)

        if not self.tell_early(rank, news):
            self._model.tell(self._births[rank], lost_after_s / BEATS, self.planes[rank].hear, news)

    def _arrived(self, source: int, deliver: Callback, arguments: tuple[object, ...]) -> None:
        for one in arguments:
            if isinstance(one, _Said):
                if source in self._silenced and not one.is_heard:
                    return
                one.is_heard = True
        deliver(*arguments)
