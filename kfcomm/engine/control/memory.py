"""The control plane of a world in one process: no sockets and no thread, and ranks that a test can kill.

A `MemoryHub` joins the `MemoryControl` planes of all ranks. It keeps the promises of `kfcomm.engine.control`; news
goes straight to every rank's loop. The ranks may share a loop or have one each. News for a rank that has not
joined yet waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kfcomm.core.gossip import EVERYBODY, CollectiveId
from kfcomm.core.membership import Message
from kfcomm.engine.control import (
    GONE,
    Answer,
    ClockReader,
    ClockSample,
    ControlEvents,
    ControlPlane,
    StatusSource,
    ToldAnswer,
    ToldClock,
    sample_of,
)
from kfcomm.errors import LocalProtocolError
from kfcomm.transports.reactor import Reactor
from kfcomm.types import override

News = Callable[[ControlEvents], None]


class MemoryHub:
    """Shared state of the control planes of one world of ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.planes: dict[int, MemoryControl] = {}
        self.left: set[int] = set()
        self.lost: set[int] = set()
        self._early: dict[int, list[News]] = {rank: [] for rank in range(size)}

    def join(self, rank: int, reactor: Reactor, events: ControlEvents, status: StatusSource) -> MemoryControl:
        """The plane of ``rank``, whose engine runs on ``reactor``.

        Raises:
            LocalProtocolError: the rank has joined before, or is not of this world.
        """
        with self.lock:
            if rank not in self._early:
                raise LocalProtocolError(f"rank {rank} cannot join: it has before, or is not of a world of {self.size}")
            plane = MemoryControl(self, rank, reactor, events, status)
            self.planes[rank] = plane
            for news in self._early.pop(rank):
                plane.hear(news)
            return plane

    def kill(self, rank: int) -> None:
        """Kill rank ``rank``: it falls silent at once, and the others are notified."""
        with self.lock:
            if rank in self.planes:
                self.planes[rank].silence()
            self.declare_lost(rank, "killed", has_ended=True)

    def tell_others(self, rank: int, news: News, about: int | None = None) -> None:
        """Tell all others ``news`` of ``rank``, or of another (``about``), now or when they join."""
        source = rank if about is None else about
        for plane in self.planes.values():
            if plane.rank != rank:
                self.carry(source, plane.rank, plane.hear, news)
        for other, early in self._early.items():
            if other != rank:
                early.append(news)

    def tell_early(self, rank: int, news: News) -> bool:
        """Keep ``news`` for ``rank`` if it has not joined yet; return whether that is so."""
        early = self._early.get(rank)
        if early is not None:
            early.append(news)
        return early is not None

    def carry(self, source: int, target: int, deliver: Callable[..., None], *arguments: Any) -> None:
        """Deliver a message of ``source`` to ``target``, in the order of all messages of ``source``."""
        del source, target
        deliver(*arguments)

    def declare_lost(self, rank: int, reason: str, *, has_ended: bool = False) -> None:
        """Tell all, the lost rank included, that ``rank`` is lost, unless that is known or it has left."""
        with self.lock:
            if rank not in self.left | self.lost:
                self.lost.add(rank)
                self.tell_others(-1, lambda events: events.on_peer_lost(rank, reason), about=rank)
                self.changed()
            if has_ended and rank in self.lost:
                self.tell_others(rank, lambda events: events.on_ended(rank))

    def changed(self) -> None:
        """Make the ranks in `MemoryControl.leave` check again."""
        for plane in self.planes.values():
            plane.look_again()


class MemoryControl(ControlPlane):
    """The plane of one rank in a `MemoryHub`; implements `kfcomm.engine.control.ControlPlane`."""

    def __init__(
        self, hub: MemoryHub, rank: int, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> None:
        self.rank = rank
        self.clock: ClockReader = time.monotonic_ns  # in nanoseconds; a test replaces it to have clocks that differ
        self._hub = hub
        self._status = status
        self._reactor = reactor
        self._events = events
        self._open = True
        self._released: set[int] = set()
        self._clear = asyncio.Event()

    @override
    def abort(self, group: bytes, key: str, seq: int, cause: Sequence[Any]) -> None:
        with self._hub.lock:
            if self._open:
                self._hub.tell_others(self.rank, lambda events: events.on_abort(group, key, seq, list(cause)))

    def suspect(self, rank: int, reason: str) -> None:
        """Do nothing: in one process every loss is known at once."""

    @override
    def declare_lost(self, rank: int, reason: str, *, has_ended: bool = False) -> None:
        if self._open and rank != self.rank:
            self._hub.declare_lost(rank, reason, has_ended=has_ended)

    @override
    def agree(self, number: int, message: Message) -> None:
        with self._hub.lock:
            if self._open:
                self._hub.tell_others(self.rank, lambda events: events.on_agreement(self.rank, number, message))

    @override
    def query(self, ops: Sequence[CollectiveId], target: int, answer: Answer) -> None:
        with self._hub.lock:
            for plane in list(self._hub.planes.values()):
                asked = plane.rank == target or (target == EVERYBODY and plane.rank != self.rank)
                if asked and self._open:
                    question = partial(plane.answer_to, self, ops, answer, is_for_all=target == EVERYBODY)
                    self._hub.carry(self.rank, plane.rank, question)

    @override
    def compare_clocks(self, rank: int, told: ToldClock) -> None:
        with self._hub.lock:
            peer = self._hub.planes.get(rank)
            sample: ClockSample | None = None
            if self._open and peer is not None and peer._open:
                asked_ns, heard_ns = self.clock(), peer.clock()
                sample = sample_of(asked_ns, heard_ns, peer.clock(), self.clock())
            self._post(told, sample)

    @override
    def observe(self, rank: int, question: bytes, told: ToldAnswer) -> None:
        with self._hub.lock:
            peer, is_gone = self._hub.planes.get(rank), rank in self._hub.left | self._hub.lost
        answer = peer._status.answer_observer(question) if peer is not None else b""
        told(None if is_gone else answer)

    @override
    async def leave(self, timeout_s: float) -> None:
        with self._hub.lock:
            if self._open and self.rank not in self._hub.left:
                self._hub.left.add(self.rank)
                self._hub.tell_others(self.rank, lambda events: events.on_leaving(self.rank))
                self._hub.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._clear.wait()

    @override
    def needed_by(self) -> list[int]:
        return sorted(set(range(self._hub.size)) - {self.rank} - self._released - self._hub.left - self._hub.lost)

    def linger(self) -> None:
        """Do nothing: a rank that is given up hears of it in any case."""

    @override
    def stop(self, goodbye_s: float = 0.0) -> None:
        with self._hub.lock:
            if self._open:
                self.silence()
                self._hub.declare_lost(self.rank, "it closed without leaving")

    def hear(self, news: News) -> None:
        """Pass news on to the engine."""
        self._post(self._tell, news)

    def answer_to(self, asker: MemoryControl, ops: Sequence[CollectiveId], answer: Answer, *, is_for_all: bool) -> None:
        """Answer a question; an asker that has asked this leaving rank alone needs it no longer."""
        has_left = self.rank in self._hub.left
        if self._open or has_left:
            posted = [self._open and self._status.is_posted(*op) for op in ops]
            activity = self._status.activity() if self._open else GONE
            self._hub.carry(self.rank, asker.rank, partial(asker._post, answer, self.rank, posted, activity))
        if not is_for_all and has_left:
            self.let_go(asker.rank)

    def look_again(self) -> None:
        """Check again whether any rank still needs this one."""
        if not self._open or not self.needed_by():
            self._post(self._clear.set)

    def let_go(self, rank: int) -> None:
        """Note that ``rank`` has no further questions to this rank."""
        self._released.add(rank)
        self.look_again()

    def silence(self) -> None:
        """Stop hearing and sending."""
        self._open = False
        self.look_again()

    def _tell(self, news: News) -> None:
        if self._open:
            news(self._events)

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the engine runs no more: nobody is left to be told
            self._reactor.call_soon_threadsafe(callback, *arguments)
