"""One launch order for operations posted in any order, for libraries whose collectives match by order, not by name.

NCCL runs the n-th collective that a rank of a communicator launches with the n-th of every other. Named collectives are
posted in any order, so the ranks of a group agree on one, as KungFu's scheduler does (Mai et al., OSDI 2020): *learned*
from one rank, the leader, in the first pass, then *followed* without a message.

Every use of a key takes one *place* in the order; a rank launches its own use there, and no later use before it.
States of the order, on every rank::

    mode       a use arrives                        a message comes                        next
    ---------  -----------------------------------  -------------------------------------  ---------
    learning   the leader gives it the next place,  TOLD: this key has the next place      learning
               and tells
    learning   the leader finds that a pass is      FIXED: so many of the latest places    following
               over, and a second one begins        are one pass, which repeats itself
    following  its place comes when it comes        (none)                                 following
    following  it is in no place of the pass; or    STUCK, to the leader                   frozen
               none has come for a while where one
               is due, and others wait
    any                                             FREEZE: launch nothing, say how far    frozen
                                                    you are (FROZEN, to the leader)
    frozen                                          RESUME: all launch what any rank has   learning
                                                    launched; the rest is learned anew

So a key that is new, that stops, or that appears twice in a pass costs an agreement of 3 messages for each rank, and
never a hang. A use that one rank never posts delays only the later uses of that rank. A use that fails before any rank
has launched it is withdrawn on all; one that some ranks have launched ends the order.

Limits: a launched use occupies the device, and later ones wait behind it. So uses in flight at the same time may be
posted in any order, but if a program waits for one use before it posts the next, all ranks must do so in that order.
Steps may overlap only as long as they repeat. Where they change, the old pass may launch a use of the next step too
early on one rank. That rank then waits for a use that another rank posts only after this step.

Between the leader and each rank messages arrive in the order in which they were sent. Time is an argument. No method
raises for what comes from a peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from enum import IntEnum, StrEnum
from typing import Any, Final, Generic, TypeVar

LEADER: Final = 0
"""Group rank from whose arrivals the order is learned."""
PATIENCE_S: Final = 1.0
MOST_PATIENT_S: Final = 64.0

Effects = list[tuple[Any, ...]]


class Order(IntEnum):
    """Tags of effects; the fields after the tag are in brackets."""

    LAUNCH = 0
    """[token]: launch this now, after every earlier launch."""
    TELL = 1
    """[message]: send it to every other rank. Only the leader does."""
    ASK = 2
    """[message]: send it to the leader. Only the others do."""
    VIOLATION = 3
    """[rank, reason]: this rank sent an invalid message."""


class Mode(StrEnum):
    """Source of the next place: the leader, a learned pass, or neither."""

    LEARNING = "learning"
    FOLLOWING = "following"
    FROZEN = "frozen"


LAUNCH, TELL, ASK, VIOLATION = (int(order) for order in Order)
TOLD, FIXED, FREEZE, FROZEN, RESUME, STUCK = range(6)


class LaunchOrder(ABC):
    """Launch order of one group as one of its ranks sees it. Made by ``launch_order``."""

    def __init__(self, rank: int, size: int, patience_s: float) -> None:
        self.mode = Mode.LEARNING
        self.num_messages = 0  # sent by this rank so far; one to every other rank counts as one
        self._rank = rank
        self._size = size
        self._patience_s = patience_s
        self._era = 0  # one more at each freeze: what was said in an earlier era is ignored
        self._waiting: dict[str, deque[Any]] = {}
        self._done = 0  # places where this rank has launched
        self._ahead: deque[str] = deque()  # whose the next places are, before any pass
        self._num_ahead: Counter[str] = Counter()
        self._history: deque[str] = deque(maxlen=MAX_CYCLE)
        self._pass: tuple[str, ...] = ()
        self._pass_begins = 0
        self._in_pass: frozenset[str] = frozenset()
        self._due_s: float | None = None

    # ---------------------------------------------------------------- what this rank does

    def arrived(self, key: str, token: Any, now_s: float, effects: Effects) -> None:
        """Post a use of a key: ``token`` is launched at its place."""
        self._waiting.setdefault(key, deque()).append(token)
        if self.mode is Mode.LEARNING:
            self._claim(key, effects)
        elif self.mode is Mode.FOLLOWING and self._has_no_place(key):
            self._doubt(effects)
        self._advance(now_s, effects)

    def take(self, key: str) -> bool:
        """Give the next place to a use that is launched at once; False, with no effect, unless it is clear that it may.

        That is so while a pass is followed, this key is next in it, and no use waits.
        """
        # Called for each repeated use: it says no more than needed, and ``arrived`` knows all the rest.
        if self.mode is not Mode.FOLLOWING or self._waiting or self._ahead:
            return False
        order = self._pass
        if order[(self._done - self._pass_begins) % len(order)] != key:
            return False
        self._done += 1
        return True

    def withdraw(self, key: str, token: Any) -> None:
        """Withdraw a use that has arrived and failed, here and on all other ranks."""
        # No rank may have launched it: its place goes to the next use of the key, on all ranks alike.
        waiting = self._waiting[key]
        waiting.remove(token)
        if not waiting:
            del self._waiting[key]

    def deadline_s(self) -> float | None:
        """Return when to call ``handle_timer``; None for never."""
        return self._due_s

    def handle_timer(self, now_s: float, effects: Effects) -> None:
        """Doubt the pass: its next use is overdue, and others wait."""
        if self._due_s is not None and now_s >= self._due_s:
            self._due_s = None
            # Wait longer the next time: the program may just be slow here.
            self._patience_s = min(2 * self._patience_s, MOST_PATIENT_S)
            self._doubt(effects)
            self._advance(now_s, effects)

    # ---------------------------------------------------------------- what others say

    def received(self, sender: int, message: Sequence[Any], now_s: float, effects: Effects) -> None:
        """Receive a message of another rank."""
        try:
            kind, era, *fields = message
            self._hear(sender, kind, era, fields, effects)
        except (TypeError, ValueError, IndexError) as error:
            effects.append((VIOLATION, sender, f"an invalid message about the launch order: {error}"))
        else:
            self._advance(now_s, effects)

    @abstractmethod
    def _hear(self, sender: int, kind: int, era: int, fields: list[Any], effects: Effects) -> None:
        """Carry out a message; a ValueError, TypeError or IndexError shows that it is invalid."""

    @abstractmethod
    def _claim(self, key: str, effects: Effects) -> None:
        """While learning: get places for uses of this key that have none."""

    @abstractmethod
    def _doubt(self, effects: Effects) -> None:
        """Drop the pass: it does not match the arrivals."""

    # ---------------------------------------------------------------- places

    def _has_no_place(self, key: str) -> bool:
        return key not in self._in_pass and len(self._waiting[key]) > self._num_ahead[key]

    def _give(self, key: str) -> None:
        """Give the next place to this key."""
        self._history.append(key)
        self._ahead.append(key)
        self._num_ahead[key] += 1

    def _fix(self, length: int, effects: Effects) -> None:
        """Follow a pass: the keys of so many of the latest places, repeated."""
        if not 0 < length <= len(self._history):
            raise ValueError(f"a pass of {length} places, with {len(self._history)} known")
        self._pass = tuple(self._history)[-length:]
        self._pass_begins = self._done + len(self._ahead)
        self._in_pass = frozenset(self._pass)
        self._history.clear()
        self.mode = Mode.FOLLOWING
        if any(map(self._has_no_place, self._waiting)):
            self._doubt(effects)

    def _freeze(self, era: int) -> None:
        self._era = era
        self.mode = Mode.FROZEN
        self._due_s = None

    def _resume(self, done: Sequence[int], effects: Effects) -> None:
        """Learn anew behind the farthest launch of any rank, up to which all ranks launch the known places."""
        if len(done) != self._size or max(done) < self._done:
            raise ValueError(f"launches by rank are {done}, on {self._size} ranks with {self._done} launched here")
        # A library's launches cannot be taken back: what one rank has launched, all launch, before anything is learned.
        owed = [self._at(place) for place in range(self._done, max(done))]
        self._ahead, self._num_ahead = deque(owed), Counter(owed)
        self._history.clear()
        self._pass, self._in_pass = (), frozenset()
        self.mode = Mode.LEARNING
        for key in list(self._waiting):
            self._claim(key, effects)

    def _at(self, place: int) -> str:
        """Return the key of a place that this rank has not reached."""
        ahead = place - self._done
        if ahead < len(self._ahead):
            return self._ahead[ahead]
        return self._pass[(place - self._pass_begins) % len(self._pass)]

    def _next(self) -> str | None:
        return self._at(self._done) if self._ahead or self._pass else None

    def _advance(self, now_s: float, effects: Effects) -> None:
        """Launch every use whose place is next."""
        while self.mode is not Mode.FROZEN:
            due = self._next()
            waiting = None if due is None else self._waiting.get(due)
            if due is None or not waiting:
                break
            token = waiting.popleft()
            if not waiting:
                del self._waiting[due]
            if self._ahead:
                self._num_ahead[self._ahead.popleft()] -= 1
            self._done += 1
            self._due_s = None
            effects.append((LAUNCH, token))
        if self.mode is not Mode.FOLLOWING or not self._waiting:
            self._due_s = None
        elif self._due_s is None:
            self._due_s = now_s + self._patience_s


class _Follower(LaunchOrder):
    """Rank that is not the leader."""

    def _hear(self, sender: int, kind: int, era: int, fields: list[Any], effects: Effects) -> None:
        if sender != LEADER:
            raise ValueError(f"rank {sender} does not lead")
        if kind == TOLD:
            self._give(fields[0])
        elif kind == FIXED:
            self._fix(fields[0], effects)
        elif kind == FREEZE:
            self._freeze(era)
            self._ask((FROZEN, era, self._done), effects)
        elif kind == RESUME:
            self._resume(fields[0], effects)
        else:
            raise ValueError(f"kind {kind!r}")

    def _claim(self, key: str, effects: Effects) -> None:
        """The leader gives places."""

    def _doubt(self, effects: Effects) -> None:
        self._freeze(self._era)  # at once: uses that a wrong pass makes due must not be launched
        self._ask((STUCK, self._era), effects)

    def _ask(self, message: tuple[Any, ...], effects: Effects) -> None:
        self.num_messages += 1
        effects.append((ASK, message))


class _Leader(LaunchOrder):
    """Rank whose arrivals define the order."""

    def __init__(self, rank: int, size: int, patience_s: float, *, follows: bool) -> None:
        super().__init__(rank, size, patience_s)
        self._follows = follows
        self._cycles: Cycles[str] = Cycles()
        self._frozen: dict[int, int] = {}

    def _hear(self, sender: int, kind: int, era: int, fields: list[Any], effects: Effects) -> None:
        if era != self._era:
            return  # said before that rank heard of this era
        if kind == STUCK:
            self._doubt(effects)
        elif kind == FROZEN:
            self._frozen[sender] = int(fields[0])
            self._resume_if_all(effects)
        else:
            raise ValueError(f"kind {kind!r}")

    def _claim(self, key: str, effects: Effects) -> None:
        while self.mode is Mode.LEARNING and len(self._waiting[key]) > self._num_ahead[key]:
            num_before = len(self._cycles.names)
            length = self._cycles.add(key) if self._follows else 0
            if not length or len(self._cycles.names) > num_before:  # else it is the first of a second pass
                self._give(key)
                self._tell((TOLD, self._era, key), effects)
            if length:
                self._tell((FIXED, self._era, length), effects)
                self._fix(length, effects)

    def _doubt(self, effects: Effects) -> None:
        if self.mode is Mode.FROZEN:
            return
        # A pass that never repeated was found too early: the next one must be longer, or it would be found again.
        has_held = self._done >= self._pass_begins + len(self._pass)
        self._cycles = Cycles(is_first=False, shortest=1 if has_held else len(self._pass) + 1)
        self._freeze(self._era + 1)
        self._frozen = {LEADER: self._done}
        self._tell((FREEZE, self._era), effects)
        self._resume_if_all(effects)

    def _resume_if_all(self, effects: Effects) -> None:
        if len(self._frozen) == self._size:
            done = [self._frozen[rank] for rank in range(self._size)]
            self._tell((RESUME, self._era, done), effects)
            self._resume(done, effects)

    def _tell(self, message: tuple[Any, ...], effects: Effects) -> None:
        self.num_messages += 1
        effects.append((TELL, message))


def launch_order(rank: int, size: int, patience_s: float = PATIENCE_S, *, follows: bool = True) -> LaunchOrder:
    """Return the launch order of a group as one of its ranks sees it.

    Args:
        rank: in the group.
        size: of the group.
        patience_s: how long the next use may be overdue while others wait, before the pass is doubted; doubles each
            time, up to a minute.
        follows: follow a repeated pass; else the leader announces every place. The same on every rank.
    """
    # Without passes: for uses that arrive as a consequence of others, in another order each time.
    if rank == LEADER:
        return _Leader(rank, size, patience_s, follows=follows)
    return _Follower(rank, size, patience_s)


Name = TypeVar("Name", bound=Hashable)

MAX_CYCLE = 1 << 13
"""Longest pass that is looked for."""

_MODULUS = (1 << 61) - 1


class Cycles(Generic[Name]):
    """Detector that reports the length of a pass, ``shortest`` at least, once the sequence repeats it."""

    def __init__(self, *, is_first: bool = True, shortest: int = 1) -> None:
        self.names: list[Name] = []  # so far
        # Take the first repeated name for the start of a second pass, in O(1) for each name. Else two whole passes
        # with the same names equally often are required, in O(names so far).
        self._is_first = is_first
        self._shortest = shortest
        self._seen: set[Name] = set()
        self._sums = [0]  # of the names' hashes: equal sums show in O(1) which passes are worth a comparison

    def add(self, name: Name) -> int:
        """Add a name; returns how many of the latest names are one pass, else 0."""
        # With ``is_first`` this name begins the next pass, and is not stored; else it is the last of the second.
        if len(self.names) >= 2 * MAX_CYCLE:
            return 0
        if self._is_first:
            if name in self._seen:
                return len(self.names)
            self._seen.add(name)
            self._is_first = len(self._seen) < MAX_CYCLE
        self.names.append(name)
        self._sums.append((self._sums[-1] + hash(name)) % _MODULUS)
        return 0 if self._is_first else self._repeated()

    def _repeated(self) -> int:
        sums, end = self._sums, len(self.names)
        for length in range(self._shortest, min(end // 2, MAX_CYCLE) + 1):
            middle, begin = end - length, end - 2 * length
            maybe = (sums[end] - 2 * sums[middle] + sums[begin]) % _MODULUS == 0
            if maybe and Counter(self.names[begin:middle]) == Counter(self.names[middle:]):
                return length
        return 0
