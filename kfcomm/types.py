"""The vocabulary of the library: what is reduced, by which verb, among whom.

Everything here is a value: immutable, hashable, and free of any import from the rest of the package.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

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
        birth: its uid, larger than all initial ranks.
        about: its address for the others, encoded.
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


class Costs(NamedTuple):
    """Measured costs of messages; None where not measured. ``strategies.cost.NetworkModel`` uses them."""

    local_alpha_s: float | None = None
    local_beta_s_per_byte: float | None = None
    cross_alpha_s: float | None = None
    cross_beta_s_per_byte: float | None = None
    overhead_s: float | None = None
    gamma_s_per_byte: float | None = None

    @classmethod
    def worst(cls, several: Iterable[Costs]) -> Costs:
        """Of each, the largest that is known."""
        known = ([one for one in ones if one is not None] for ones in zip(*several, strict=True))
        return cls(*(max(ones, default=None) for ones in known))


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
        return Layout.of((self.hosts[rank] for rank in ranks), self.num_cpus, self.costs)

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
        return tuple(self.hosts.index(host) for host in range(self.num_hosts))

    def local_rank(self, rank: int) -> int:
        """The position of ``rank`` among the ranks of its host."""
        return self.ranks_of(self.hosts[rank]).index(rank)
