"""The vocabulary of the library: what is reduced, by which verb, among whom.

Everything here is a value: immutable, hashable, and free of any import from the rest of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from datetime import timedelta

    from typing_extensions import override as override
else:  # in the standard library from Python 3.12 on

    def override(method: object) -> object:
        """Mark a method that implements or replaces one of a base class or protocol, which documents it."""
        return method


Seconds: TypeAlias = "float | timedelta"
"""How callers give a time; see ``kfcomm.common.sizes.seconds_of``."""


class Candidate(NamedTuple):
    """A process that waits to join.

    Attributes:
        birth: its uid, larger than the number of every initial rank.
        about: its encoded address, for the other ranks.
    """

    birth: int
    about: bytes


ANY_SIZE = -1
"""No size was requested."""


class Wanted(NamedTuple):
    """Requested size of a running job, and ranks that are to leave.

    Attributes:
        size: the requested number of ranks.
        leavers: uids of the ranks that are to leave, for any size.
    """

    size: int = ANY_SIZE
    leavers: tuple[int, ...] = ()


class Op(StrEnum):
    """How the contributions of the ranks are combined."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PROD = "prod"
    AND = "and"
    OR = "or"
    XOR = "xor"


class Verb(StrEnum):
    """Kind of a collective call."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    BARRIER = "barrier"
    SET_STRATEGY = "set_strategy"


class Uplink(NamedTuple):
    """Link between a rack and the rest of the network, which the hosts of the rack share.

    Attributes:
        hosts: those of the rack, ascending.
        send: bytes/s that leave the rack at most.
        receive: bytes/s that come to it from other hosts at most.
    """

    hosts: tuple[int, ...]
    send: float
    receive: float


class Rates(NamedTuple):
    """Rates of ports and links between hosts of a heterogeneous network.

    The ranks of a host share its port, which is full duplex; a message occupies the port of the host that sends it, the
    port of the one that receives it, the link between the two, and the uplinks of their racks if these are two.

    Attributes:
        send: bytes/s that leave each host at most.
        receive: bytes/s that each host takes at most.
        links: bytes/s from host (row) to host (column), alone; the diagonal does not matter.
        latency_s: from host to host, 0 on the diagonal; empty where it is not known.
        uplinks: of racks, each host in one at most; those that hold up several hosts together.
    """

    send: tuple[float, ...]
    receive: tuple[float, ...]
    links: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...] = ()
    uplinks: tuple[Uplink, ...] = ()

    @property
    def rack_of(self) -> tuple[int | None, ...]:
        """Number of each host's uplink; None for hosts without one."""
        racks: list[int | None] = [None] * len(self.send)
        for number, uplink in enumerate(self.uplinks):
            for host in uplink.hosts:
                racks[host] = number
        return tuple(racks)

    def part(self, hosts: Sequence[int]) -> Rates:
        """The rates of some of the hosts, in this order."""

        def square(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(rows[a][b] for b in hosts) for a in hosts) if rows else ()

        send, receive = (tuple(ports[host] for host in hosts) for ports in (self.send, self.receive))
        places = {host: place for place, host in enumerate(hosts)}
        left = [
            uplink._replace(hosts=tuple(sorted(places[host] for host in uplink.hosts if host in places)))
            for uplink in self.uplinks
        ]
        # Of a single host the links are the uplink, and a rack of all hosts has nothing beyond it.
        uplinks = tuple(uplink for uplink in left if 1 < len(uplink.hosts) < len(hosts))
        return Rates(send, receive, square(self.links), square(self.latency_s), uplinks)


class Costs(NamedTuple):
    """Measured costs of messages; None where not measured. ``strategies.cost.NetworkModel`` uses them.

    ``rates`` has one entry for each host of the layout that these costs are of.
    """

    local_alpha_s: float | None = None
    local_beta_s_per_byte: float | None = None
    cross_alpha_s: float | None = None
    cross_beta_s_per_byte: float | None = None
    overhead_s: float | None = None
    gamma_s_per_byte: float | None = None
    rates: Rates | None = None

    @classmethod
    def worst(cls, several: Iterable[Costs]) -> Costs:
        """Of each constant, the largest that is known; without rates, which have no order."""
        constants = zip(*(one.constants for one in several), strict=True)
        known = ([one for one in ones if one is not None] for ones in constants)
        return cls(*(max(ones, default=None) for ones in known))

    @classmethod
    def of_record(cls, record: Sequence[Any]) -> Costs:
        """Read costs back from JSON, which has lists in the place of tuples."""
        costs = cls(*record)
        if costs.rates is None:
            return costs
        rates = Rates(*map(_tuples, costs.rates))
        return costs._replace(rates=rates._replace(uplinks=tuple(Uplink(*one) for one in rates.uplinks)))

    @property
    def constants(self) -> tuple[float | None, ...]:
        """All but the rates."""
        return self[:-1]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check_racks(uplinks: Sequence[Uplink], num_hosts: int) -> None:
    """Raise `ValueError` if racks name hosts outside 0..num_hosts-1 or a host twice, or rates are not above 0."""
    named = [host for uplink in uplinks for host in uplink.hosts]
    unknown = sorted(host for host in named if not 0 <= host < num_hosts)
    if unknown:
        raise ValueError(f"a rack names host {unknown[0]}, the layout has {num_hosts}: 0..{num_hosts - 1}")
    twice = sorted(host for host in set(named) if named.count(host) > 1)
    if twice:
        raise ValueError(f"host {twice[0]} is in two racks: expected one at most")
    rates = [rate for uplink in uplinks for rate in (uplink.send, uplink.receive)]
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"uplinks have rates {rates}: expected finite numbers of bytes/s above 0")


UNMEASURED = Costs()


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of the ranks of a group: ``hosts[r]`` is the host of rank ``r``.

    Hosts are numbered 0, 1, 2, ... in the order in which the ranks first mention them.

    Attributes:
        hosts: by rank.
        num_cpus: processors of a host, of the one that has the fewest; 0 if that is not known.
        costs: of messages, on the hosts where they cost most.
    """

    hosts: tuple[int, ...]
    num_cpus: int = 0
    costs: Costs = UNMEASURED

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a layout needs at least one rank")
        seen = 0
        for host in self.hosts:
            if not 0 <= host <= seen:
                raise ValueError(f"hosts must be numbered in order of first mention: {self.hosts}")
            seen = max(seen, host + 1)
        rates = self.costs.rates
        if rates is not None and len(rates.send) != seen:
            raise ValueError(f"the costs have rates of {len(rates.send)} hosts, the layout has {seen}")
        if rates is not None and rates.uplinks:
            check_racks(rates.uplinks, seen)

    @classmethod
    def of(cls, names: Iterable[object], num_cpus: int = 0, costs: Costs = UNMEASURED) -> Layout:
        """The layout of ranks whose hosts have these names (any hashable)."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names), num_cpus, costs)

    @classmethod
    def even(cls, size: int, hosts: int = 1, num_cpus: int = 0) -> Layout:
        """``size`` ranks dealt out in blocks, as evenly as possible, over ``hosts`` hosts."""
        if not 1 <= hosts <= size:
            raise ValueError(f"{size} ranks cannot occupy {hosts} hosts")
        return cls(tuple(rank * hosts // size for rank in range(size)), num_cpus)

    def part(self, ranks: Iterable[int]) -> Layout:
        """The layout of some of the ranks, in this order."""
        hosts = [self.hosts[rank] for rank in ranks]
        costs = self.costs
        if costs.rates is not None:
            present = list(dict.fromkeys(hosts))
            costs = costs._replace(rates=costs.rates.part(present) if len(present) > 1 else None)
        return Layout.of(hosts, self.num_cpus, costs)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return max(self.hosts) + 1

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """The ranks on one host, ascending."""
        return tuple(rank for rank, at in enumerate(self.hosts) if at == host)

    @property
    def masters(self) -> tuple[int, ...]:
        """The first rank of each host."""
        firsts: dict[int, int] = {}
        for rank, host in enumerate(self.hosts):
            firsts.setdefault(host, rank)
        return tuple(firsts.values())

    def local_rank(self, rank: int) -> int:
        """The position of ``rank`` among the ranks of its host."""
        return self.ranks_of(self.hosts[rank]).index(rank)
