"""Gossip: news for every rank, over links to a few neighbours each.

The living ranks form a ring. A rank's neighbours are those at distance ±1, ±2, ±4, ... on it, so that there are
about 2·log2(size) of them and no more than log2(size) steps between any two ranks. A *flood* reaches everybody: each
rank forwards the first copy to all its neighbours but the one it came from, and drops later copies, recognized by
``(origin, number)``. A STATUS answers a QUERY, and travels back along the path of the first copy of the query.

Ranks that leave are not flooded one by one: size² · log2(size) messages where all leave at once. A LEAVING names all
ranks that its neighbour has yet to hear of. The caller decides when it is sent (`Gossip.say_left`); all of a job need
log2(size) rounds then, in which each rank sends one message to each neighbour.

Invariants:

- Each flood is delivered at most once per rank, and exactly once to every rank that the links in use connect to its
  origin, in whatever order the copies arrive.
- Each LEAVING comes before a flood that follows it, on every path.
- A link that comes up late, or again, first carries what was flooded before: ranks that left or are lost, the latest
  message of each kind of each rank in an agreement, and the latest news. So a flood that was sent while links were
  missing, or lost with one, still arrives.
- Memory is bounded, whatever arrives: a window of numbers per origin, the latest floods, the latest queries.
- Nothing from the wire raises: a message that does not fit its row of the table below becomes a FAIL effect.

A message is a header ``[Kind.GOSSIP, origin, number, body]``; a body begins with its `Body`. The caller
reports which links are up, and carries out the effects. After a flap a query or its answer may be lost; the rank that
asked repeats it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

from kfcomm.core import membership
from kfcomm.core.frame import MAX_FIELD_NBYTES, Header, Kind
from kfcomm.errors import LocalProtocolError

MAX_GROUP_NBYTES = 64
MAX_QUERY_OPS = 64
MAX_QUERY_NBYTES = 1 << 15
MAX_TEXT_NBYTES = MAX_FIELD_NBYTES
MAX_NAMED_RANKS = 1024
"""Most ranks that an abort names as arrived, and as missing; and that one LEAVING or RELEASE names."""
WINDOW = 1024
"""Numbers per origin that may arrive out of order; older ones count as seen."""
MAX_RECENT = 128
MAX_WAYS = 4096
EVERYBODY = -1


class Body(IntEnum):
    """Kinds of messages; the fields after the tag are in brackets."""

    ABORT = 1
    """[group id, key, seq, cause]: this collective failed; cause = [kind, rank or -1, message, arrived, missing]."""
    LOST = 2
    """[rank, reason, has ended]: this rank is gone without a goodbye; whether its process is known to have ended."""
    LEAVING = 3
    """[ranks]: these have closed their communicators and post nothing more; they stay to answer questions."""
    QUERY = 4
    """[target or -1, ops]: which of these (group id, key, seq) have you posted?"""
    STATUS = 5
    """[rank, posted, activity]: the answer of a rank; origin and number are the query's."""
    AGREE = 6
    """[number, message]: message of the origin in its agreement of that number, see `kfcomm.core.membership`."""

    RELEASE = 7
    """[ranks]: the origin stays, and asks these, which have left, nothing more."""


class Effect(IntEnum):
    """Tags of the effects; the fields after the tag are in brackets."""

    SEND = 0
    """[neighbour, header]"""
    DELIVER = 1
    """[origin, number, body]: news for this rank; a STATUS answers this rank's flood of that number."""
    FAIL = 2
    """[neighbour, reason]: it broke the protocol; only its link is to be closed."""


Effects = list[tuple[Any, ...]]
CollectiveId = tuple[bytes, str, int]
"""Group id, key, sequence number."""


def ring_neighbours(rank: int, living: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks at distance ±1, ±2, ±4, ... from ``rank`` on the ring of the ``living``, in ascending order."""
    size, here = len(living), living.index(rank)
    steps = [1 << power for power in range((size - 1).bit_length())]
    return tuple(sorted({living[(here + way * step) % size] for step in steps for way in (1, -1)} - {rank}))


def dials(rank: int, other: int, living: Sequence[int]) -> bool:
    """Return whether ``rank`` dials ``other``: of two neighbours, the one that has the other nearer ahead dials."""
    size = len(living)
    ahead = (living.index(other) - living.index(rank)) % size
    behind = size - ahead
    if not _is_power(ahead) or not _is_power(behind):
        return _is_power(ahead)
    return rank < other if ahead == behind else ahead < behind


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def clip(text: str, nbytes: int = MAX_TEXT_NBYTES) -> str:
    """Return at most so many bytes of ``text`` as UTF-8; characters without an encoding become ``?``."""
    return text.encode("utf-8", "replace")[:nbytes].decode("utf-8", "ignore")


def batches(ops: Iterable[CollectiveId]) -> list[list[list[Any]]]:
    """Split the ops of a query into parts that each fit one QUERY; one empty part for none."""
    parts: list[list[list[Any]]] = [[]]
    room = MAX_QUERY_NBYTES
    for group, key, seq in ops:
        need = len(key.encode("utf-8", "replace")) + len(group)
        if need > room or len(parts[-1]) == MAX_QUERY_OPS:
            parts.append([])
            room = MAX_QUERY_NBYTES
        parts[-1].append([group, key, seq])
        room -= need
    return parts


class Gossip:
    """Gossip of one rank in a world of ``size``; the caller carries out returned effects in order."""

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise LocalProtocolError(f"rank {rank} is outside a world of {size}")
        self.rank = rank
        self.size = size
        self._gone: set[int] = set()
        self._linked: dict[int, None] = {}  # ordered: effects come in the same order on every run
        self._seen = [_Seen() for _ in range(size)]
        self._next_number = 0
        self._facts: dict[int, Header] = {}  # losses, by rank
        self._agreed: dict[tuple[int, int], Header] = {}
        self._recent: deque[Header] = deque(maxlen=MAX_RECENT)
        self._ways: dict[tuple[int, int], int] = {}
        self._left: dict[int, None] = {}
        self._untold: dict[int, dict[int, None]] = {}
        """By neighbour, the ranks that have left and that it has yet to hear of."""

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that have neither left nor been lost, as far as this rank has heard, and itself."""
        return tuple(rank for rank in range(self.size) if rank == self.rank or rank not in self._gone)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks to which this one should have a link; as ranks go, others take their place."""
        return ring_neighbours(self.rank, self.living)

    @property
    def missing(self) -> tuple[int, ...]:
        """The neighbours to which no link is up."""
        # Those with `is_dialler` false should dial this rank, but may not know yet, or be dead and not detected: the
        # caller dials them as well after a while.
        return tuple(rank for rank in self.neighbours if rank not in self._linked)

    def is_dialler(self, neighbour: int) -> bool:
        """Return whether this rank dials that living neighbour; exactly one of the two does."""
        return dials(self.rank, neighbour, self.living)

    @property
    def linked(self) -> tuple[int, ...]:
        """The ranks to which a link is up, neighbours or not; all of them are used."""
        return tuple(self._linked)

    def neighbour_joined(self, rank: int) -> Effects:
        """Use a new link to ``rank``, which first gets the news that it may have missed."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise LocalProtocolError(f"rank {rank} cannot be a neighbour of rank {self.rank} in a world of {self.size}")
        self._linked[rank] = None
        self._untold[rank] = dict(self._left)
        missed = (*self._facts.values(), *self._agreed.values(), *self._recent)
        return [*self.say_left(), *((Effect.SEND, rank, header) for header in missed)]

    def neighbour_lost(self, rank: int) -> None:
        """Stop using the link to ``rank``, which is down. Calling it again does nothing."""
        self._linked.pop(rank, None)
        self._untold.pop(rank, None)

    def leave(self) -> None:
        """Note that this rank leaves; `say_left` tells the neighbours."""
        self._note_left([self.rank], self.rank)

    def say_left(self) -> Effects:
        """Tell each neighbour of the ranks that have left, as far as it has yet to hear of them."""
        effects: Effects = []
        for neighbour, ranks in self._untold.items():
            named = list(ranks)
            ranks.clear()
            for first in range(0, len(named), MAX_NAMED_RANKS):
                body = [Body.LEAVING, named[first : first + MAX_NAMED_RANKS]]
                effects.append((Effect.SEND, neighbour, (Kind.GOSSIP, self.rank, 0, body)))
        return effects

    def flood(self, body: Sequence[Any]) -> tuple[int, Effects]:
        """Flood a body; returns the number of the flood, which its answers carry, and the effects."""
        fault = _fault(self.rank, body, self.size)
        if fault or body[0] in (Body.STATUS, Body.LEAVING):
            raise LocalProtocolError(fault or "a STATUS is sent with answer(), a LEAVING with leave()")
        number = self._next_number
        self._next_number += 1
        header: Header = (Kind.GOSSIP, self.rank, number, list(body))
        return number, self._spread(header, self.rank)

    def answer(self, origin: int, number: int, posted: Sequence[bool], activity: str) -> Effects:
        """Answer the QUERY ``number`` of ``origin`` along the path that it took; dropped if that is broken."""
        body = [Body.STATUS, self.rank, list(posted), clip(activity)]
        return self._pass_back((Kind.GOSSIP, origin, number, body))

    def receive(self, neighbour: int, header: Header) -> Effects:
        """Receive a GOSSIP header (checked by `kfcomm.core.frame.decode_header`) from ``neighbour``."""
        _, origin, number, body = header
        fault = _fault(origin, body, self.size)
        if fault:
            return [(Effect.FAIL, neighbour, fault)]
        if body[0] == Body.STATUS:
            return self._pass_back(header)
        if body[0] == Body.LEAVING:
            ranks = self._note_left(body[1], neighbour)
            return [(Effect.DELIVER, origin, number, [Body.LEAVING, ranks])] if ranks else []
        # Only the first copy is passed on, which ends the flood; an answer takes its path back.
        if origin == self.rank or not self._seen[origin].add(number):
            return []
        if body[0] == Body.QUERY:
            self._remember_way(origin, number, neighbour)
        return [(Effect.DELIVER, origin, number, body), *self._spread(header, neighbour)]

    def _spread(self, header: Header, source: int) -> Effects:
        body = header[3]
        if body[0] == Body.LOST:
            self._gone.add(body[1])
            # A known end of the process is stronger news than a loss, and replaces it for late links.
            if body[3] or body[1] not in self._facts:
                self._facts[body[1]] = header
        elif body[0] == Body.AGREE:
            fact = (header[1], body[2][0])
            self._agreed.pop(fact, None)  # so that the latest is last: late links get them in order
            self._agreed[fact] = header
        else:
            self._recent.append(header)
        return [*self.say_left(), *((Effect.SEND, rank, header) for rank in self._linked if rank != source)]

    def _note_left(self, ranks: Sequence[int], source: int) -> list[int]:
        """Note that these have left, as ``source`` knows; return those that this rank had yet to hear of."""
        new = [rank for rank in dict.fromkeys(ranks) if rank not in self._left]
        self._left.update(dict.fromkeys(new))
        self._gone.update(new)
        for neighbour, untold in self._untold.items():
            if neighbour == source:
                for rank in ranks:
                    untold.pop(rank, None)
            else:
                untold.update(dict.fromkeys(new))
        return new

    def _remember_way(self, origin: int, number: int, neighbour: int) -> None:
        if len(self._ways) == MAX_WAYS:
            del self._ways[next(iter(self._ways))]
        self._ways[origin, number] = neighbour

    def _pass_back(self, header: Header) -> Effects:
        _, origin, number, body = header
        if origin == self.rank:
            return [(Effect.DELIVER, origin, number, body)]
        way = self._ways.get((origin, number))
        return [(Effect.SEND, way, header)] if way in self._linked else []


class _Seen:
    """Numbers of one origin that were seen: all below the mark, and those of ``above``."""

    __slots__ = ("above", "mark")

    def __init__(self) -> None:
        self.mark = 0
        self.above: set[int] = set()

    def add(self, number: int) -> bool:
        """Record a number; False if it was seen before."""
        if number < self.mark or number in self.above:
            return False
        self.above.add(number)
        # A number that never arrives must not let the set grow for ever.
        if number >= self.mark + WINDOW:
            self.mark = number - WINDOW + 1
            self.above = {kept for kept in self.above if kept >= self.mark}
        while self.mark in self.above:
            self.above.remove(self.mark)
            self.mark += 1
        return True


def _is_rank(value: object, size: int) -> bool:
    return type(value) is int and 0 <= value < size


def _is_rank_or_none(value: object, size: int) -> bool:
    return type(value) is int and EVERYBODY <= value < size


def _is_ranks(value: object, size: int) -> bool:
    return type(value) is list and len(value) <= MAX_NAMED_RANKS and all(_is_rank(rank, size) for rank in value)


def _is_text(value: object, _: int) -> bool:
    # Characters, not bytes: the decoder bounds the bytes of arriving texts, `clip` those of sent ones.
    return type(value) is str and len(value) <= MAX_TEXT_NBYTES


def _is_group(value: object, _: int) -> bool:
    return type(value) is bytes and len(value) <= MAX_GROUP_NBYTES


def _is_seq(value: object, _: int) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_cause(value: object, size: int) -> bool:
    return type(value) is list and _fits(value, _CAUSE, size)


def _is_ops(value: object, size: int) -> bool:
    if type(value) is not list or len(value) > MAX_QUERY_OPS:
        return False
    return all(type(op) is list and _fits(op, _OP, size) for op in value)


def _is_flags(value: object, _: int) -> bool:
    return type(value) is list and len(value) <= MAX_QUERY_OPS and all(type(flag) is bool for flag in value)


def _is_flag(value: object, _: int) -> bool:
    return type(value) is bool


def _is_agreement(value: object, size: int) -> bool:
    return type(value) is list and not membership.fault(value, size)


_Check = Callable[[object, int], bool]
_CAUSE: tuple[_Check, ...] = (_is_text, _is_rank_or_none, _is_text, _is_ranks, _is_ranks)
_OP: tuple[_Check, ...] = (_is_group, _is_text, _is_seq)
_ROWS: dict[int, tuple[_Check, ...]] = {
    Body.ABORT: (_is_group, _is_text, _is_seq, _is_cause),
    Body.LOST: (_is_rank, _is_text, _is_flag),
    Body.LEAVING: (_is_ranks,),
    Body.QUERY: (_is_rank_or_none, _is_ops),
    Body.STATUS: (_is_rank, _is_flags, _is_text),
    Body.AGREE: (_is_seq, _is_agreement),
    Body.RELEASE: (_is_ranks,),
}


def _fits(values: Sequence[Any], checks: tuple[_Check, ...], size: int) -> bool:
    return len(values) == len(checks) and all(check(value, size) for check, value in zip(checks, values, strict=True))


def _fault(origin: int, body: Sequence[Any], size: int) -> str:
    """Return why this message is not valid in a world of ``size``; empty if it is."""
    if not _is_rank(origin, size):
        return f"gossip from rank {origin}, in a world of {size}"
    if not body or type(body[0]) not in (int, Body) or body[0] not in _ROWS:
        return "gossip of an unknown kind"
    if not _fits(body[1:], _ROWS[body[0]], size):
        return f"gossip {Body(body[0]).name} with fields that do not fit"
    return ""
