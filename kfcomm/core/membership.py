"""Consensus among the ranks of an epoch on its survivors, with some bytes of each.

Every rank *enters* with a part, some bytes. The decision consists of the survivors' parts. It is the same on all ranks
that learn it, even if messages are lost and any ranks die meanwhile, the leader included. It is consensus by ballots
(the synod of Lamport, 1998). The leader of a ballot first collects what the others may have accepted in earlier
ballots, then proposes; a quorum of acceptances decides. Rank 0 leads the first ballot, which needs no promises; the
lowest living rank leads further ballots when they are needed.

A *quorum* of the n ranks is

- more than half of them, or
- all ranks except those that have *ended*: known for certain to have exited or left.

So at most one side of a partition can decide, and a last survivor decides alone. To make the second rule safe, a ballot
lists the ranks that have ended, and a rank that promises or accepts it ignores them from then on: a decision that they
made among themselves, and that no survivor knows, does not count.

Invariants:

- All ranks that decide, decide the same. The decision has the part of this rank, unless the others count it as lost.
- No rank decides before every remaining rank has entered.
- Messages go to all others; of each kind, a rank's latest must arrive in the end. Time and links are not known here.

Messages are ``(tag, fields...)``; those from the wire are checked by `fault`.

The *failure detector* asks quiet peers for a sign of life. A watched peer that has been quiet for a while is sent a
heartbeat, which it answers. A peer from which nothing has come for ``lost_after_s`` is lost: stopped, stuck, or on an
unreachable host, which look alike from here.

Only time in which this process itself was awake counts. After a SIGSTOP, or a suspend of the machine, all peers look
silent until what they have sent meanwhile is read. So a late look subtracts its delay from the silence of every peer.

Time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

MAX_PART_NBYTES = 256
MAX_BALLOT = 1 << 62

Value = tuple[tuple[int, bytes], ...]
"""Rank and part of each survivor, ascending."""
Message = tuple[Any, ...]


class Tag(IntEnum):
    """Kinds of messages; the fields after the tag are in brackets."""

    ENTER = 0
    """[part]: the origin takes part, with these bytes."""
    PREPARE = 1
    """[ballot, ended]: the origin leads this ballot, in which these ranks have ended."""
    PROMISE = 2
    """[ballot, accepted, value]: the origin accepts nothing below this ballot; the last that it accepted, or -1."""
    ACCEPT = 3
    """[ballot, ended, value]: the origin leads this ballot, and proposes this value."""
    ACCEPTED = 4
    """[ballot]: the origin has accepted the proposal of this ballot."""
    DECIDED = 5
    """[value]"""


class EpochDecision:
    """One decision, as one of ``size`` ranks takes part in it. Methods return messages for all others."""

    def __init__(self, rank: int, size: int, gone: Iterable[int] = (), ended: Iterable[int] = ()) -> None:
        self.value: Value | None = None
        self._rank = rank
        self._size = size
        self._parts: dict[int, bytes] = {}
        self._ended = set(ended)
        self._gone = self._ended | set(gone)
        self._unheard: set[int] = set()  # ended by a ballot that this rank has promised or accepted: ignored
        self._promised = 0
        self._accepted: tuple[int, Value] = (-1, ())
        # Rank 0 leads ballot 0 without promises, as no ballot can come before it: one round less without a loss.
        self._led = 0 if rank == 0 else -1
        self._led_ended: frozenset[int] = frozenset()
        self._has_proposed = False
        self._promises: dict[int, tuple[int, Value]] = {}
        self._proposals: dict[int, tuple[frozenset[int], Value]] = {}
        self._votes: dict[int, set[int]] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are not gone and have not entered."""
        return tuple(rank for rank in self.living() if rank not in self._parts)

    @property
    def is_cut_off(self) -> bool:
        """Whether all living ranks have entered and are too few; known ends of further ranks would resolve that."""
        return self.value is None and not self.missing and not self._is_quorum(self.living(), self._ended)

    def enter(self, part: bytes) -> list[Message]:
        """Take part, once."""
        return self._say([], (Tag.ENTER, part))

    def receive(self, origin: int, message: Message) -> list[Message]:
        """Receive a message of another rank that has no `fault`."""
        said: list[Message] = []
        self._hear(said, origin, message)
        return said

    def lost(self, ranks: Collection[int], *, have_ended: bool) -> list[Message]:
        """Count these ranks as gone, and if ``have_ended``, as ended for certain."""
        self._gone.update(ranks)
        if have_ended:
            self._ended.update(ranks)
        said: list[Message] = []
        self._pass_on(said)
        return self._lead(said)

    def leave(self) -> list[Message]:
        """Return the last words before leaving: peers stop counting this rank, so they must know its decision."""
        return [] if self.value is None else [(Tag.DECIDED, self.value)]

    # ---------------------------------------------------------------- what is said and heard

    def _say(self, said: list[Message], message: Message) -> list[Message]:
        said.append(message)
        self._hear(said, self._rank, message)
        return said

    def _hear(self, said: list[Message], origin: int, message: Message) -> None:
        # An ended rank may have voted for a value that no survivor knows: its votes must not count after that.
        if origin in self._unheard:
            return
        tag, *fields = message
        if tag == Tag.ENTER:
            self._parts.setdefault(origin, fields[0])
        elif tag == Tag.PREPARE:
            self._on_prepare(said, *fields)
        elif tag == Tag.PROMISE:
            ballot, accepted, value = fields
            if ballot == self._led:
                self._promises[origin] = (accepted, value)
        elif tag == Tag.ACCEPT:
            self._on_accept(said, *fields)
        elif tag == Tag.ACCEPTED:
            self._votes.setdefault(fields[0], set()).add(origin)
            self._count(said, fields[0])
        elif self.value is None:
            self.value = fields[0]
        self._lead(said)

    def _on_prepare(self, said: list[Message], ballot: int, ended: Sequence[int]) -> None:
        if self.value is not None:
            self._say(said, (Tag.DECIDED, self.value))
        elif ballot > self._promised:
            self._follow(ballot, ended)
            self._say(said, (Tag.PROMISE, ballot, *self._accepted))

    def _on_accept(self, said: list[Message], ballot: int, ended: Sequence[int], value: Value) -> None:
        self._proposals[ballot] = (frozenset(ended), value)
        if ballot >= self._promised and self.value is None:
            self._follow(ballot, ended)
            self._accepted = (ballot, value)
            self._say(said, (Tag.ACCEPTED, ballot))
        self._count(said, ballot)

    def _follow(self, ballot: int, ended: Sequence[int]) -> None:
        self._promised = ballot
        self._unheard.update(ended)
        self._ended.update(ended)
        self._gone.update(ended)

    def _count(self, said: list[Message], ballot: int) -> None:
        if self.value is None and ballot in self._proposals:
            ended, value = self._proposals[ballot]
            if self._is_quorum(self._votes.get(ballot, ()), ended):
                self.value = value
                self._pass_on(said)

    def _pass_on(self, said: list[Message]) -> None:
        """Forward the decision: the last message of a rank that is gone may have reached this rank alone."""
        if self.value is not None and self._gone:
            self._say(said, (Tag.DECIDED, self.value))

    # ---------------------------------------------------------------- who leads

    def living(self) -> list[int]:
        """Return the ranks that are not gone, as far as this one knows."""
        return [rank for rank in range(self._size) if rank not in self._gone]

    def _is_quorum(self, ranks: Collection[int], ended: Collection[int]) -> bool:
        if 2 * len(ranks) > self._size:
            return True
        return bool(ranks) and all(rank in ranks or rank in ended for rank in range(self._size))

    def _lead(self, said: list[Message]) -> list[Message]:
        """Act as the leader if this is the lowest living rank and all have entered."""
        living = self.living()
        if self.value is not None or self.missing or living[:1] != [self._rank]:
            return said
        if self._led == self._promised and self._is_quorum(living, self._led_ended):
            if not self._has_proposed and (self._led == 0 or all(rank in self._promises for rank in living)):
                self._has_proposed = True
                # What was accepted in the highest ballot may be decided already: it must be proposed again.
                accepted, value = max(self._promises.values(), default=(-1, ()))
                if accepted < 0:
                    value = tuple((rank, self._parts[rank]) for rank in living)
                self._say(said, (Tag.ACCEPT, self._led, sorted(self._led_ended), value))
        elif self._is_quorum(living, self._ended):
            # The next number above what was promised that is this rank's alone: no two ranks lead one ballot.
            self._led = (self._promised // self._size + 1) * self._size + self._rank
            self._led_ended = frozenset(self._ended)
            self._has_proposed = False
            self._promises = {}
            self._say(said, (Tag.PREPARE, self._led, sorted(self._led_ended)))
        return said


def fault(message: Sequence[Any], size: int) -> bool:
    """Return whether this is not a valid message of an epoch of ``size`` ranks."""
    if not message or type(message[0]) is not int or not 0 <= message[0] < len(_FIELDS):
        return True
    checks = _FIELDS[message[0]]
    if len(message) != len(checks) + 1:
        return True
    return not all(check(field, size) for check, field in zip(checks, message[1:], strict=True))


def _is_ballot(field: object, _: int) -> bool:
    return type(field) is int and -1 <= field < MAX_BALLOT


def _is_part(field: object, _: int = 0) -> bool:
    return type(field) is bytes and len(field) <= MAX_PART_NBYTES


def _is_ranks(field: object, size: int) -> bool:
    return type(field) is list and len(field) <= size and all(type(one) is int and 0 <= one < size for one in field)


def _is_value(field: object, size: int) -> bool:
    if type(field) is not list or len(field) > size:
        return False
    return all(type(row) is list and len(row) == 2 and _is_ranks(row[:1], size) and _is_part(row[1]) for row in field)


_FIELDS: tuple[tuple[Any, ...], ...] = (
    (_is_part,),
    (_is_ballot, _is_ranks),
    (_is_ballot, _is_ballot, _is_value),
    (_is_ballot, _is_ranks, _is_value),
    (_is_ballot,),
    (_is_value,),
)


def to_wire(message: Message) -> list[Any]:
    """Return msgpack-able fields."""
    return [
        [list(row) for row in field] if type(field) is tuple else field for field in (int(message[0]), *message[1:])
    ]


def from_wire(fields: Sequence[Any]) -> Message:
    """Return the message of these fields, which have no `fault`: the inverse of `to_wire`."""
    *first, last = fields
    if fields[0] in (Tag.PROMISE, Tag.ACCEPT, Tag.DECIDED):
        last = tuple((rank, part) for rank, part in last)
    return (*first, last)


BEATS = 6
"""Heartbeats to a silent peer before it is lost."""
LONGEST_INTERVAL_S = 5.0


class Look(NamedTuple):
    """Findings of one look at all peers."""

    gone: list[tuple[int, float]]  # lost peers, each with the seconds of its silence
    quiet: list[int]  # peers to be sent a heartbeat
    next_s: float  # when to look again


class FailureDetector:
    """Silence of the peers that one rank watches; after ``lost_after_s`` a peer is lost (infinite: never)."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._interval_s = min(lost_after_s / BEATS, LONGEST_INTERVAL_S)
        self._heard_s: dict[int, float] = {}
        self._due_s = math.inf

    def watch(self, peers: Iterable[int], now_s: float) -> None:
        """Watch these peers and no others; a new one counts as heard now."""
        self._heard_s = {peer: self._heard_s.get(peer, now_s) for peer in peers}

    def heard(self, peer: int, now_s: float) -> None:
        """Record that something has come from a peer."""
        if peer in self._heard_s:
            self._heard_s[peer] = now_s

    def look(self, now_s: float) -> Look:
        """Look at all watched peers."""
        # A late look means that this process was stopped, and has not yet read what peers sent meanwhile.
        late_s = now_s - self._due_s
        if late_s > self._interval_s:
            self._heard_s = {peer: min(now_s, heard_s + late_s) for peer, heard_s in self._heard_s.items()}
        silent = {peer: now_s - heard_s for peer, heard_s in self._heard_s.items()}
        gone = [(peer, silent_s) for peer, silent_s in silent.items() if silent_s >= self._lost_after_s]
        quiet = [peer for peer, silent_s in silent.items() if self._interval_s / 2 <= silent_s < self._lost_after_s]
        left_s = [self._lost_after_s - silent_s for silent_s in silent.values() if silent_s < self._lost_after_s]
        self._due_s = now_s + min(self._interval_s, *left_s, math.inf)
        return Look(gone, quiet, self._due_s)
