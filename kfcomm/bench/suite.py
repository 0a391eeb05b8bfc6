"""Options and results of a benchmark: a `Suite`, its `Case`s, the `BenchResult` of each, and events on the way.

A case fixes everything but the results. Every rank derives the same cases from the same suite and the size of the
world. Pure: nothing is measured or allocated here.

Bandwidths are those of nccl-tests: algbw is the size of the message by the time, busbw is algbw times a factor of the
collective (`COLLECTIVES`), which makes it comparable to what the links can carry, whatever the number of ranks. Both
are of the median time. Rank 0 writes each event as a line of JSON; other lines, such as the output of a library, read
as None.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self, TypeAlias

from kfcomm.arrays.dtypes import dtype_of
from kfcomm.arrays.reduce import kernel
from kfcomm.bench.workloads import WORKLOADS, Shape, num_parameters
from kfcomm.common.arguments import hint
from kfcomm.common.sizes import show_size
from kfcomm.errors import ConfigError
from kfcomm.strategies.plugins import check
from kfcomm.transports.registry import LINKS, TRANSPORT_NAMES
from kfcomm.types import Op, Verb

_MOST_ITERATIONS = 200
_FEWEST_ITERATIONS = 10
_NBYTES_PER_CASE = 512 << 20


class CallMode(StrEnum):
    """How the tensors of a workload are exchanged."""

    ONE_BY_ONE = "one-by-one"
    ALL_AT_ONCE = "all-at-once"
    FUSED = "fused"


class BenchPlace(StrEnum):
    """Memory of the arrays."""

    CPU = "cpu"
    SYMMETRIC = "symmetric"
    """As ``cpu``, but in memory that the ranks of a host share: see ``Communicator.empty``."""
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a collective."""

    reduces: bool  # it combines values, by an op
    shares: bool  # a rank sends or gets one of n parts, so that the size must divide among them
    factor: Callable[[int], float]  # busbw / algbw among n ranks, as nccl-tests define it (their doc/PERFORMANCE.md)


def _twice_all_but_one(size: int) -> float:
    return 2 * (size - 1) / size


def _all_but_one(size: int) -> float:
    return (size - 1) / size


def _one(_: int) -> float:
    return 1.0


COLLECTIVES: Final = {
    Verb.ALL_REDUCE: Traits(reduces=True, shares=False, factor=_twice_all_but_one),
    Verb.REDUCE: Traits(reduces=True, shares=False, factor=_one),
    Verb.BROADCAST: Traits(reduces=False, shares=False, factor=_one),
    Verb.GATHER: Traits(reduces=False, shares=True, factor=_all_but_one),
    Verb.ALL_GATHER: Traits(reduces=False, shares=True, factor=_all_but_one),
    Verb.SCATTER: Traits(reduces=False, shares=True, factor=_all_but_one),
    Verb.REDUCE_SCATTER: Traits(reduces=True, shares=True, factor=_all_but_one),
    Verb.ALL_TO_ALL: Traits(reduces=False, shares=True, factor=_all_but_one),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the report."""

    transport: str  # kind of links, one of `TRANSPORT_NAMES`
    strategy: str
    dtype: str
    collective: Verb
    op: Op | None  # how values are combined; None where they are not
    workload: str | None  # name of the workload; None for one tensor
    mode: CallMode | None  # how the workload's tensors are exchanged; None for one tensor
    nbytes: int  # size of the message: of the largest buffer that a rank sends from or receives into
    iterations: int
    warmup: int  # number of runs before them

    def describe(self) -> str:
        """The case in a few words."""
        what = f"{self.workload} {self.mode}" if self.workload else f"{self.collective} of {show_size(self.nbytes)}"
        op = f" ({self.op})" if self.op else ""
        return f"{what}{op}, {self.dtype}, strategy {self.strategy}, transport {self.transport}"

    def shapes(self, size: int) -> tuple[Shape, ...]:
        """Shapes of the tensors: a workload's, or one that divides into equal parts for the ranks."""
        if self.workload is not None:
            return WORKLOADS[self.workload]()
        count = self.nbytes // dtype_of(self.dtype).itemsize
        return ((size, count // size),) if COLLECTIVES[self.collective].shares else ((count,),)

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> Self:
        """The case whose fields came as JSON."""
        op, mode = fields["op"], fields["mode"]
        return cls(
            **{
                **fields,
                "collective": Verb(fields["collective"]),
                "op": None if op is None else Op(op),
                "mode": None if mode is None else CallMode(mode),
            }
        )


@dataclass(frozen=True, slots=True)
class Suite:
    """Options of a benchmark; every combination is measured."""

    collectives: tuple[Verb, ...] = (Verb.ALL_REDUCE,)  # the verbs to measure at each of ``sizes``
    sizes: tuple[int, ...] = (1 << 10, 1 << 20)  # bytes of the messages; see `Case.nbytes`
    workloads: tuple[str, ...] = ()  # names of the workloads to measure, by all_reduce, in each of ``modes``
    modes: tuple[CallMode, ...] = tuple(CallMode)  # how their tensors are exchanged
    strategies: tuple[str, ...] = ("auto",)
    transports: tuple[str, ...] = ("auto",)
    dtypes: tuple[str, ...] = ("float32",)
    op: Op = Op.SUM  # how values are combined
    iterations: int | None = None  # timed runs of each case; None for as many as its size makes reasonable
    warmup: int = 3  # runs before them
    blocking: bool = False  # measure ``kfcomm.sync`` instead of the asynchronous interface
    device: BenchPlace = BenchPlace.CPU  # memory of the arrays

    @property
    def is_on_device(self) -> bool:
        """Whether the arrays are in the memory of devices."""
        return self.device is BenchPlace.GPU

    def check(self, size: int) -> None:
        """Check that it can be measured among ``size`` ranks, before anything begins.

        Raises:
            ConfigError: a name is unknown, the op does not suit a dtype, or a size leaves a rank without an element.
        """
        for strategy in self.strategies:
            check(strategy)
        for transport in self.transports:
            if transport not in TRANSPORT_NAMES:
                near = hint(transport, TRANSPORT_NAMES)
                raise ConfigError(f"transport {transport!r} is unknown; known are {', '.join(TRANSPORT_NAMES)}{near}")
            if transport not in LINKS and not self.is_on_device:
                raise ConfigError(f"transport {transport!r} is for arrays on devices: add --device gpu")
        for workload in self.workloads:
            if workload not in WORKLOADS:
                raise ConfigError(
                    f"workload {workload!r} is unknown{hint(workload, WORKLOADS)}; known are {', '.join(WORKLOADS)}"
                )
        for element in map(dtype_of, self.dtypes):
            if self.workloads or any(COLLECTIVES[verb].reduces for verb in self.collectives):
                kernel(self.op, element)  # raises if they do not suit each other
        for verb, nbytes, dtype in itertools.product(self.collectives, self.sizes, self.dtypes):
            if not _rounded(verb, nbytes, dtype, size):
                parts = f" for each of {size} ranks" if COLLECTIVES[verb].shares else ""
                raise ConfigError(f"size {show_size(nbytes)}: {verb} needs at least one {dtype}{parts}")

    def cases(self, size: int) -> list[Case]:
        """All cases, in the order in which they are measured; those of one transport follow each other."""
        # A change of transport takes a new world, and one of strategy a collective: these change least often.
        return [
            case
            for transport, strategy, dtype in itertools.product(self.transports, self.strategies, self.dtypes)
            for case in itertools.chain(
                self._of_collectives(transport, strategy, dtype, size), self._of_workloads(transport, strategy, dtype)
            )
        ]

    def _of_collectives(self, transport: str, strategy: str, dtype: str, size: int) -> Iterator[Case]:
        for verb, asked in itertools.product(self.collectives, self.sizes):
            nbytes = _rounded(verb, asked, dtype, size)
            op = self.op if COLLECTIVES[verb].reduces else None
            yield Case(
                transport, strategy, dtype, verb, op, None, None, nbytes, self._iterations(nbytes), self.warmup
            )  # fmt: skip

    def _of_workloads(self, transport: str, strategy: str, dtype: str) -> Iterator[Case]:
        for workload, mode in itertools.product(self.workloads, self.modes):
            nbytes = num_parameters(WORKLOADS[workload]()) * dtype_of(dtype).itemsize
            yield Case(
                transport, strategy, dtype, Verb.ALL_REDUCE, self.op, workload, mode, nbytes,
                self._iterations(nbytes), self.warmup,
            )  # fmt: skip

    def _iterations(self, nbytes: int) -> int:
        if self.iterations is not None:
            return self.iterations
        # About equal bytes for each case: large messages get fewer iterations.
        return max(_FEWEST_ITERATIONS, min(_MOST_ITERATIONS, _NBYTES_PER_CASE // nbytes))

    def to_json(self) -> str:
        """The suite for `from_json`, in another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The suite that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        for name, kind in (("collectives", Verb), ("modes", CallMode)):
            fields[name] = map(kind, fields[name])
        for name in ("collectives", "sizes", "workloads", "modes", "strategies", "transports", "dtypes"):
            fields[name] = tuple(fields[name])
        return cls(**{**fields, "op": Op(fields["op"]), "device": BenchPlace(fields["device"])})


def _rounded(verb: Verb, nbytes: int, dtype: str, size: int) -> int:
    """``nbytes`` without what makes no whole element, for each rank where they have a part each."""
    unit = dtype_of(dtype).itemsize * (size if COLLECTIVES[verb].shares else 1)
    return nbytes // unit * unit


_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A case and the times of its iterations."""

    case: Case  # what was measured
    size: int
    times_s: tuple[float, ...]  # seconds that the slowest rank took, for each iteration

    @property
    def p50_s(self) -> float:
        """The median time."""
        return statistics.median(self.times_s)

    @property
    def p99_s(self) -> float:
        """The time that 99 of 100 iterations do not exceed; the longest, if there are fewer."""
        # the shortest measured time that at least 99 % of all do not exceed (nearest rank)
        return sorted(self.times_s)[max(0, math.ceil(0.99 * len(self.times_s)) - 1)]

    @property
    def factor(self) -> float:
        """The factor of the collective: busbw / algbw."""
        return COLLECTIVES[self.case.collective].factor(self.size)

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth, in 10⁹ bytes per second."""
        return self.bandwidth(self.p50_s)

    @property
    def busbw(self) -> float:
        """Bus bandwidth, in 10⁹ bytes per second."""
        return self.algbw * self.factor

    def bandwidth(self, time_s: float) -> float:
        """The algbw if it took ``time_s``, in 10⁹ bytes per second."""
        return self.case.nbytes / time_s / _GIGA


_TAG = "kfcomm-bench"


@dataclass(frozen=True, slots=True)
class Begun:
    """The world is complete."""

    size: int
    total: int  # number of cases
    hosts: tuple[dict[str, Any], ...]  # descriptions of the hosts, each with the ``ranks`` on it
    devices: dict[str, Any] | None = None  # those that hold the arrays, and their routes; None for arrays on hosts


@dataclass(frozen=True, slots=True)
class Starting:
    """A case is about to be measured."""

    case: Case


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """A case has been measured, and its results were right."""

    result: BenchResult


@dataclass(frozen=True, slots=True)
class Failed:
    """The benchmark ended: a result was wrong."""

    message: str


Event: TypeAlias = Begun | Starting | MeasuredCase | Failed
Emit: TypeAlias = Callable[[Event], None]


def to_line(event: Event) -> str:
    """The event as a line, without its line break."""
    return json.dumps({_TAG: type(event).__name__, **asdict(event)})


def from_line(line: str) -> Event | None:
    """The event of a line; None if it is another line."""
    if not line.startswith('{"' + _TAG):
        return None
    fields = json.loads(line)
    kind = fields.pop(_TAG)
    match kind:
        case "Begun":
            return Begun(fields["size"], fields["total"], tuple(fields["hosts"]), fields["devices"])
        case "Starting":
            return Starting(Case.from_wire(fields["case"]))
        case "MeasuredCase":
            result = fields["result"]
            return MeasuredCase(BenchResult(Case.from_wire(result["case"]), result["size"], tuple(result["times_s"])))
        case _:
            return Failed(fields["message"])
