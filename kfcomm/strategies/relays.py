"""Relays: hosts that fold what others send before they pass it on, and their flows in ports; see `incast`.

Beside other senders a relay differs in two ways: while those below fill its port, acknowledgements to it wait; and it
has no more to send than the slowest of those below brings. By hosts, from the graphs on which bytes are folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self, TypeAlias

from kfcomm.strategies.incast import Sender, drain_s, full_s
from kfcomm.types import Rates

Ends: TypeAlias = tuple[int, int]
"""From host to host."""


class Folding(NamedTuple):
    """A graph along which bytes are folded, and how many."""

    parents: Sequence[int]  # by rank; a root has itself
    nbytes: float


class Relays(NamedTuple):
    """Hosts that pass on what they fold.

    Attributes:
        full_s: by host, seconds for which those whose bytes it folds fill its port.
        paces: bytes per second that come at most from one host to another, where that is less than ports and links let
            through.
    """

    full_s: Mapping[int, float]
    paces: Mapping[Ends, float]

    @classmethod
    def of(cls, graphs: Iterable[Folding], hosts: Sequence[int], rates: Rates) -> Self:
        """Walk all graphs: O(graphs · ranks), more where several hosts are below a relay; ``hosts`` are by rank."""
        folded: dict[Ends, float] = {}
        paces: dict[Ends, float] = {}
        for parents, nbytes in graphs:
            for ends, pace in _streams(parents, hosts, rates):
                folded[ends] = folded.get(ends, 0.0) + nbytes
                paces[ends] = paces.get(ends, 0.0) + pace
        to: dict[int, list[Sender]] = {}
        for (a, b), nbytes in folded.items():
            to.setdefault(b, []).append(Sender(nbytes, min(_rate(rates, a, b), paces[a, b])))
        full = {host: full_s(senders, rates.receive[host]) for host, senders in to.items()}
        return cls(full, {ends: pace for ends, pace in paces.items() if pace < _rate(rates, *ends)})

    def sender(self, ends: Ends, nbytes: float, rates: Rates) -> Sender:
        """The traffic of a host in the port of another."""
        rate = min(_rate(rates, *ends), self.paces.get(ends, float("inf")))
        return Sender(nbytes, rate, self.full_s.get(ends[0], 0.0))


def _rate(rates: Rates, a: int, b: int) -> float:
    return min(rates.send[a], rates.links[a][b])


def _streams(parents: Sequence[int], hosts: Sequence[int], rates: Rates) -> Iterator[tuple[Ends, float]]:
    """Each message between hosts on the way up, and the bytes per second that it has at most; no limit for a leaf."""
    children: dict[int, list[int]] = {}
    for rank, above in enumerate(parents):
        if rank != above:
            children.setdefault(above, []).append(rank)
    has: dict[int, float] = {}  # bytes per second of what is folded, of ranks with others below
    for rank in _upwards(parents, children):
        below = [(hosts[child], has.get(child, float("inf"))) for child in children[rank]]
        for host, pace in below:
            if host != hosts[rank]:
                yield (host, hosts[rank]), pace
        if parents[rank] != rank:  # nothing waits for the root
            has[rank] = _folded_rate(below, hosts[rank], rates)


def _upwards(parents: Sequence[int], children: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """Ranks with others below them, those before the ones above."""
    order = [rank for rank, above in enumerate(parents) if rank == above and rank in children]
    for rank in order:  # it grows
        order += [child for child in children[rank] if child in children]
    return order[::-1]


def _folded_rate(below: Sequence[tuple[int, float]], here: int, rates: Rates) -> float:
    """Bytes per second at which a rank folds what it gets of all below, by host and pace."""
    senders = [Sender(1.0, min(_rate(rates, host, here), pace)) for host, pace in below if host != here]
    local = min((pace for host, pace in below if host == here), default=float("inf"))
    return min(local, 1 / drain_s(senders, rates.receive[here])) if senders else local
