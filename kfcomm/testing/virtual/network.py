"""Clock and network in virtual time: latencies, delayed and lost messages, and links over them.

Everything here follows from the seed, the events, and the messages of the ranks. Ranks are those of the beginning here,
and never those of an epoch.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from random import Random
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from kfcomm.errors import TransportError
from kfcomm.testing.network import InMemory
from kfcomm.testing.virtual.events import Delay, Event, Partition, SlowLink, Stop
from kfcomm.transports.base import Link
from kfcomm.transports.memory import MemoryNetwork
from kfcomm.transports.reactor import Callback, Reactor
from kfcomm.types import override

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BEGIN_S = 1.0
"""First reading of a clock: some code takes 0 for never."""


class Stuck(AssertionError):
    """All ranks wait, or the time is up, and some ranks have not ended."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with a virtual clock: descriptors are not watched, and no thread runs beside it."""

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        super().__init__(_NoDescriptors(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it here, before this returns: a thread would bring real time and chance into the run."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  it is the caller's
            future.set_exception(error)
        return future


class _NoDescriptors(selectors.SelectSelector):
    """Selector that advances the clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let time pass; raises `Stuck` if nothing will ever be ready."""
        if timeout is None:
            raise Stuck("all ranks wait, and some have not ended")
        if timeout > 0:
            self._loop.now_s += timeout
        return []


class VirtualReactor(Reactor):
    """For one thread."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(clock=loop.time)

    def call_soon_threadsafe(self, callback: Callback, *arguments: Any) -> None:
        """Call soon; all threads of a virtual world are this one.

        Raises:
            RuntimeError: the reactor is closed.
        """
        if not self.descriptors():
            raise RuntimeError("this reactor is closed")
        self.call_soon(callback, *arguments)


class Timing(NamedTuple):
    """Seconds."""

    lost_after_s: float  # after so long without a word ranks are lost to each other
    latency_s: tuple[float, float]  # how long anything takes, at least and at most


class VirtualNetworkModel:
    """Network between the ranks of a world."""

    def __init__(self, reactor: Reactor, random: Random, events: Sequence[Event], timing: Timing) -> None:
        self.timing = timing
        self.random = random
        self.lost: set[tuple[int, int]] = set()  # pairs that have lost each other, in both orders
        self.num_sent = 0
        self._reactor = reactor
        self._began_s = reactor.time()
        self._slow = [one for one in events if isinstance(one, (Delay, SlowLink))]
        self._held = [one for one in events if isinstance(one, (Stop, Partition))]
        self._last_s: dict[tuple[int, int, str], float] = {}
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Digest of the messages: sender, receiver and time."""
        return self._digest.hexdigest()

    def carry(self, source: int, target: int, channel: str, deliver: Callback, *arguments: Any) -> None:
        """Deliver a message by a call on arrival, unless they have lost each other by then."""
        due_s = self.arrival_s(source, target, channel)
        self._reactor.call_at(due_s, self._arrived, (source, target), deliver, arguments)

    def tell(self, rank: int, within_s: float, deliver: Callback, *arguments: Any) -> None:
        """Call ``deliver`` when ``rank`` has detected something, which it does within this time."""
        now_s = self._reactor.time() + self.random.uniform(0, within_s)
        self._reactor.call_at(self._passes_s(rank, rank, now_s - self._began_s) + self._began_s, deliver, *arguments)

    def arrival_s(self, source: int, target: int, channel: str) -> float:
        """Time of arrival of a message that is sent now."""
        now_s = self._reactor.time() - self._began_s
        due_s = now_s + self.random.uniform(*self.timing.latency_s)
        for one in self._slow:
            if one.at_s <= now_s < one.at_s + one.for_s and _is_slow(one, source, target):
                due_s += one.by_s
        road = (source, target, channel)
        # Not before an earlier message of the same channel: each channel keeps its order.
        due_s = self._passes_s(source, target, max(due_s, self._last_s.get(road, 0.0)))
        self._last_s[road] = due_s
        self.num_sent += 1
        self._digest.update(f"{road} {now_s:.9f} {due_s:.9f}\n".encode())
        return self._began_s + due_s

    def are_lost(self, one: int, other: int) -> bool:
        """Whether these two have lost each other."""
        return (one, other) in self.lost

    def lose(self, one: int, other: int) -> bool:
        """Note that they have lost each other; return whether that is new."""
        is_new = (one, other) not in self.lost
        self.lost |= {(one, other), (other, one)}
        return is_new

    def _arrived(self, road: tuple[int, int], deliver: Callback, arguments: tuple[Any, ...]) -> None:
        if road not in self.lost:  # looked at on arrival: what was under way when they lost each other is lost, too
            deliver(*arguments)

    def _passes_s(self, source: int, target: int, due_s: float) -> float:
        """Time of arrival with delays, for a message that was due at ``due_s``."""
        is_held = True
        # The end of one event may lie in another: looked at again until none holds the message.
        while is_held:
            is_held = False
            for one in self._held:
                if one.at_s <= due_s < one.at_s + one.for_s and _is_held(one, source, target):
                    due_s, is_held = one.at_s + one.for_s, True
        return due_s


def side_of(partition: Partition, rank: int) -> int:
    """The number of the side that a rank is on."""
    return next((number for number, side in enumerate(partition.sides) if rank in side), len(partition.sides))


def _is_held(event: Stop | Partition, source: int, target: int) -> bool:
    if isinstance(event, Stop):
        return event.rank in (source, target)
    return side_of(event, source) != side_of(event, target)


def _is_slow(event: Delay | SlowLink, source: int, target: int) -> bool:
    if isinstance(event, Delay):
        return event.rank == source
    return {event.one, event.other} == {source, target}


class _Wire:
    """Driver of a link: callbacks run when their message arrives at the other end."""

    def __init__(self, model: VirtualNetworkModel, reactor: Reactor, source: int, target: int) -> None:
        self._model = model
        self._reactor = reactor
        self._road = source, target

    def call_soon(self, callback: Callback, *arguments: Any) -> None:
        """Time at which it has arrived. Each rank notices the end of a link in any case."""
        if self._model.are_lost(*self._road):
            self._reactor.call_soon(callback, *arguments)
        else:
            self._reactor.call_at(self._model.arrival_s(*self._road, "link"), callback, *arguments)


class _Wires(MemoryNetwork):
    def __init__(self, reactor: Reactor, model: VirtualNetworkModel, uids: Sequence[int]) -> None:
        super().__init__(reactor)
        self._driver = reactor
        self._model = model
        self._uids = uids

    @override
    def wire(self, rank: int, peer: int) -> Any:
        return _Wire(self._model, self._driver, self._uids[rank], self._uids[peer])


class VirtualLinks(InMemory):
    """Links between the ranks of one epoch."""

    def __init__(self, reactor: Reactor, model: VirtualNetworkModel, uids: Sequence[int]) -> None:
        super().__init__(reactor)
        self._network: _Wires = _Wires(reactor, model, uids)
        self._model = model
        self._uids = uids

    async def connect(self, rank: int, peer: int) -> Link:
        """Connect to a peer, after a latency.

        Raises:
            TransportError: they have lost each other.
        """
        road = self._uids[rank], self._uids[peer]
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._model.arrival_s(*road, "open") - loop.time()))
        if self._model.are_lost(*road):
            raise TransportError(f"rank {peer} does not answer")
        return await super().connect(rank, peer)

    def lose(self, one: int, other: int) -> None:
        """Break the link between these two."""
        if one in self._uids and other in self._uids:
            rank, peer = self._uids.index(one), self._uids.index(other)
            self._network.part(rank, peer, reason=f"nothing passes between ranks {rank} and {peer}")
