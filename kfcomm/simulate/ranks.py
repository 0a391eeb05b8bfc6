"""Rank of a simulation: a core machine for each of its calls, and the processor time of their effects.

Invariants: a rank does one thing at a time, of all calls, in the order in which chunks arrive, as the runtime's event
loop does. Each message that it sends or receives takes ``overhead_s``, and the time of its bytes if it crosses hosts;
each fold takes that of its bytes. The sends that follow from a chunk leave when its other work is done, like the frames
of a burst; within one flow, chunks of one priority leave in the order in which the machines emitted them.

Where the ranks of a host are more than its processors, they take turns: the rank that waits longest is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kfcomm.core.collective import ItemSizes
from kfcomm.core.machine import FOLD, FOLD_LAST, FOLD_UP, SEND, UP, Effect, Machine
from kfcomm.core.program import ABSENT, Lane, Program
from kfcomm.core.recorder import EffectRecorder
from kfcomm.errors import InternalError
from kfcomm.simulate.ports import Agenda, Flow


class Chunk(NamedTuple):
    """Chunk under way: the contents of its frame."""

    call: int
    lane: int
    number: int
    phase: int
    sender: int
    nbytes: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SimulatedWork:
    """Costs of a rank's work."""

    overhead_s: float  # of each message that it sends or receives
    copy_s_per_byte: float  # of sending to another host, and of receiving from there
    fold_s_per_byte: float  # of folding
    hosts: tuple[int, ...]  # by rank

    def message_s(self, rank: int, other: int, nbytes: int) -> float:
        """Seconds of work for ``rank`` to exchange a message with another."""
        if not self.copy_s_per_byte or self.hosts[rank] == self.hosts[other]:
            return self.overhead_s
        return self.overhead_s + self.copy_s_per_byte * nbytes


class Way(NamedTuple):
    """Flow from a rank to another, or to several that are alike."""

    flow: Flow
    target: int  # the first of them
    times: int = 1  # how many they are


Carry = Callable[[int, Effect], Any]
"""Called with a rank and each effect of its machine, before its time is counted; what it returns for a SEND travels as
that chunk's payload. By it the data of a collective can be carried along."""


class Processors:
    """Processors that some ranks share."""

    __slots__ = ("_agenda", "_free", "_waiting")

    def __init__(self, agenda: Agenda, number: int) -> None:
        self._agenda = agenda
        self._free = number
        self._waiting: deque[Rank] = deque()

    def take(self, rank: Rank) -> bool:
        """Whether ``rank`` may work now; else it is called later."""
        if self._free:
            self._free -= 1
            return True
        self._waiting.append(rank)
        return False

    def give(self) -> None:
        """Note that a rank has finished its work."""
        if self._waiting:
            # An event, not a call: thousands of ranks may pass the processor on at once, and calls would nest as deep.
            self._agenda.at(self._agenda.now_s, Rank.work, self._waiting.popleft())
        else:
            self._free += 1


@dataclass(frozen=True, slots=True)
class SimulatedSurroundings:
    """Surroundings of all ranks of a simulation."""

    agenda: Agenda  # virtual time
    ways: Callable[[Rank, tuple[int, ...]], tuple[Way, ...]]  # makes the flows from a rank to others
    work: SimulatedWork  # costs
    carry: Carry | None  # see ``Carry``


class RankCall:
    """One call on one rank."""

    __slots__ = (
        "done_s", "early", "machine", "nbytes_sent", "num_messages", "number", "posted_s", "priority", "program",
        "recorder", "sizes",
    )  # fmt: skip

    def __init__(self, number: int, program: Program, sizes: ItemSizes, priority: int = 0) -> None:
        self.number = number
        self.program = program
        self.sizes = sizes  # bytes per element
        self.priority = priority
        self.recorder = EffectRecorder([])
        self.machine = Machine(program, self.recorder)
        self.early: list[Chunk] | None = []  # what arrived before it was posted; None from then on
        self.posted_s: float | None = None
        self.done_s: float | None = None  # when it was complete here
        self.num_messages = 0  # sent
        self.nbytes_sent = 0

    @property
    def num_to_send(self) -> int:
        """Messages that it sends in all."""
        if self.program.steps:
            return self.program.num_step_sends
        lanes = self.program.lanes.values()
        return sum(lane.num_chunks * ((lane.parent != ABSENT) + len(lane.targets)) for lane in lanes)

    def elements(self, lane: Lane, index: int) -> int:
        """Of one chunk."""
        chunk: int = self.program.chunk_elements
        return min(chunk, lane.count - index * chunk)


class Rank:
    """One rank; without ``processors``, which it shares with others, it has its own.

    ``on_done``, where it is given, is called with the number of each call when that is complete.
    """

    __slots__ = (
        "_agenda", "_carry", "_find_ways", "_inbox", "_is_busy", "_processors", "_ways", "_work", "calls", "number",
        "on_done",
    )  # fmt: skip

    def __init__(
        self,
        surroundings: SimulatedSurroundings,
        number: int,
        calls: tuple[RankCall, ...],
        processors: Processors | None,
    ) -> None:
        self.number = number
        self.calls = calls
        self.on_done: Callable[[int], None] | None = None
        self._agenda = surroundings.agenda
        self._find_ways = surroundings.ways
        self._work = surroundings.work
        self._carry = surroundings.carry
        self._ways: dict[tuple[int, ...], tuple[Way, ...]] = {}
        self._processors = processors
        self._inbox: deque[Chunk | RankCall] = deque()
        self._is_busy = False

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return len(self._work.hosts)

    def post(self, number: int) -> None:
        """Queue the beginning of a call; it is handled when there is time."""
        call = self.calls[number]
        call.posted_s = self._agenda.now_s
        early, call.early = call.early, None
        self._inbox.append(call)
        self._inbox.extend(early or ())
        self._wake()

    def arrived(self, chunk: Chunk) -> None:
        """Queue a chunk that has arrived, or keep it until its call is posted."""
        early = self.calls[chunk.call].early
        if early is not None:
            early.append(chunk)
            return
        self._inbox.append(chunk)
        self._wake()

    def was_read(self, chunk: Chunk, times: int = 1) -> None:
        """Note that a chunk has left this rank's memory, for so many destinations."""
        call = self.calls[chunk.call]
        for _ in range(times):
            call.machine.was_read()
        if call.recorder.effects:
            self._perform(call)
            self._complete(call, self._agenda.now_s)

    def work(self) -> None:
        """Do the next piece of work on a free processor."""
        while True:
            sends, busy_s = self._do(self._inbox.popleft())
            if busy_s:
                # What a chunk makes this rank send leaves when all work for the chunk is done, like the frames of a
                # burst.
                self._agenda.at(self._agenda.now_s + busy_s, self._finish, sends)
                return
            self._send(sends)
            if not self._inbox:
                self._rest()
                return

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._go_on()

    def _do(self, what: Chunk | RankCall) -> tuple[list[tuple[Way, Chunk]], float]:
        """Take in a chunk, or begin a call; returns what to send then, and the seconds of work."""
        busy_s = 0.0
        if isinstance(what, RankCall):
            call = what
            call.recorder.begin(call.machine)
        else:
            call = self.calls[what.call]
            route = call.program.routes.get((what.lane, what.phase, what.sender))
            if route is None or not call.machine.accepts(route, what.number):
                raise InternalError(f"rank {self.number} was sent a chunk that its machine does not take: {what}")
            call.machine.arrived(route, what.number, what.payload)
            busy_s = self._work.message_s(self.number, what.sender, what.nbytes)
        sends, for_effects_s = self._perform(call)
        busy_s += for_effects_s
        if call.done_s is None and not (call.machine.remaining or call.machine.sends):
            self._complete(call, self._agenda.now_s + busy_s)
        return sends, busy_s

    def _complete(self, call: RankCall, at_s: float) -> None:
        call.done_s = at_s
        if self.on_done is not None:
            self._agenda.at(at_s, self.on_done, call.number)

    def _go_on(self) -> None:
        if self._processors is None or self._processors.take(self):
            self.work()

    def _finish(self, sends: list[tuple[Way, Chunk]]) -> None:
        self._send(sends)
        self._rest()

    def _rest(self) -> None:
        """Leave the processor to others, and continue when it is this rank's turn again."""
        if self._processors is not None:
            self._processors.give()
        if self._inbox:
            self._go_on()
        else:
            self._is_busy = False

    def _send(self, sends: list[tuple[Way, Chunk]]) -> None:
        for way, chunk in sends:
            call = self.calls[chunk.call]
            way.flow.send(chunk, chunk.nbytes, call.priority)
            call.nbytes_sent += chunk.nbytes * way.times
            call.num_messages += way.times

    def _perform(self, call: RankCall) -> tuple[list[tuple[Way, Chunk]], float]:
        """Carry out what a machine has decided; returns what to send after them, and the seconds of work."""
        work, rank, carry, sizes = self._work, self.number, self._carry, call.sizes
        sends: list[tuple[Way, Chunk]] = []
        seconds = 0.0
        effects, call.recorder.effects = call.recorder.effects, []
        for effect in effects:
            tag = effect[0]
            carried = None if carry is None else carry(rank, effect)
            if tag == SEND:
                _, _, to, lane, index, phase, _, _ = effect
                count = lane.count if lane.num_chunks == 1 else call.elements(lane, index)
                nbytes = count * (sizes.partial if phase == UP and lane.children else sizes.item)
                ways = self._ways.get(to)
                if ways is None:
                    ways = self._ways[to] = self._find_ways(self, to)
                chunk = Chunk(call.number, lane.number, index, phase, rank, nbytes, carried)
                for way in ways:
                    sends.append((way, chunk))
                    seconds += work.message_s(rank, way.target, nbytes) * way.times
            elif tag in (FOLD, FOLD_UP, FOLD_LAST):
                seconds += work.fold_s_per_byte * call.elements(effect[2], effect[3]) * sizes.partial
        return sends, seconds
