"""Relays: hosts that fold what others send before they pass it on, and flows between hosts in ports; see `incast`.

Beside other senders a relay differs in two ways: while those below fill its port, acknowledgements to it wait; and it
has no more to send than the slowest of those below brings. Acknowledgements of a host wait, too, while it fills its own
port with what others fold. By hosts, from the graphs on which bytes are folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self, TypeAlias

from kfcomm.strategies.incast import Sender, drain_s, full_s
from kfcomm.types import Rates

Ends: TypeAlias = tuple[int, int]
"""From host to host."""


class Folding(NamedTuple):
    """Graphs along which bytes are folded, and the result passed on, and how many bytes; a root is its own parent."""

    up: Sequence[int]  # the rank above, by rank
    down: Sequence[int]
    nbytes: float


class Relays(NamedTuple):
    """Hosts that pass on what they fold.

    Attributes:
        into_s: by host, seconds for which those whose bytes it folds fill its port.
        out_s: by host, seconds for which it fills its port with what others fold.
        paces: bytes per second of what is folded that come at most from one host to another, where that is less than
            ports and links let through.
        own: the same of all bytes from one host to another, in the port out of it. What is late there is not made up
            for; in distant ports results are, since they can wait for it.
    """

    into_s: Mapping[int, float]
    out_s: Mapping[int, float]
    paces: Mapping[Ends, float]
    own: Mapping[Ends, float]

    @classmethod
    def of(cls, graphs: Iterable[Folding], hosts: Sequence[int], rates: Rates) -> Self:
        """Walk all graphs: O(graphs · ranks), more where several hosts are below a relay; ``hosts`` are by rank."""
        folded: dict[Ends, float] = {}
        paces: dict[Ends, float] = {}
        own: dict[Ends, float] = {}
        for up, down, nbytes in graphs:
            streams, result = _streams(up, hosts, rates)
            for ends, pace in streams:
                folded[ends] = folded.get(ends, 0.0) + nbytes
                paces[ends] = paces.get(ends, 0.0) + pace
            results = [
                ((hosts[above], hosts[rank]), result) for rank, above in enumerate(down) if hosts[rank] != hosts[above]
            ]
            for ends, pace in (*streams, *results):
                own[ends] = own.get(ends, 0.0) + pace
        into: dict[int, list[Sender]] = {}
        out: dict[int, list[Sender]] = {}
        for (a, b), nbytes in folded.items():
            sender = Sender(nbytes, min(_rate(rates, a, b), paces[a, b]))
            into.setdefault(b, []).append(sender)
            out.setdefault(a, []).append(sender)
        return cls(
            {host: _about(full_s(senders, rates.receive[host])) for host, senders in into.items()},
            {host: _about(full_s(senders, rates.send[host])) for host, senders in out.items()},
            *({ends: pace for ends, pace in them.items() if pace < _rate(rates, *ends)} for them in (paces, own)),
        )

    def sender(self, ends: Ends, nbytes: float, rates: Rates, *, is_own: bool = False) -> Sender:
        """The traffic from a host to another, in a port that it passes; ``is_own``: in that out of its host."""
        paces = self.own if is_own else self.paces
        rate = min(_rate(rates, *ends), paces.get(ends, float("inf")))
        a, b = ends
        return Sender(nbytes, rate, (self.into_s.get(a, 0.0), self.out_s.get(b, 0.0)), is_own)


def _about(seconds: float) -> float:
    """Two digits: hosts that are about alike then change at the same time, and ports have few phases."""
    return float(f"{seconds:.1e}")


def _rate(rates: Rates, a: int, b: int) -> float:
    return min(rates.send[a], rates.links[a][b])


def _streams(parents: Sequence[int], hosts: Sequence[int], rates: Rates) -> tuple[list[tuple[Ends, float]], float]:
    """Each message between hosts on the way up, with the bytes per second that it has at most, and those of the result.

    A leaf has no limit.
    """
    children: dict[int, list[int]] = {}
    for rank, above in enumerate(parents):
        if rank != above:
            children.setdefault(above, []).append(rank)
    streams: list[tuple[Ends, float]] = []
    has: dict[int, float] = {}  # bytes per second of what is folded, of ranks with others below; the root's last
    for rank in _upwards(parents, children):
        below = [(hosts[child], has.get(child, float("inf"))) for child in children[rank]]
        streams += [((host, hosts[rank]), pace) for host, pace in below if host != hosts[rank]]
        has[rank] = _folded_rate(below, hosts[rank], rates)
    return streams, next(reversed(has.values()), float("inf"))


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
