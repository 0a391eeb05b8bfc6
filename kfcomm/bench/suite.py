"""Options of a benchmark as a `Suite`, and the `Case`s that it unfolds into.

A case fixes everything but the results. Every rank derives the same cases from the same suite and
the size of the world. Pure: nothing is measured or allocated here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

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


class Mode(StrEnum):
    """How the tensors of a workload are exchanged."""

    ONE_BY_ONE = "one-by-one"
    ALL_AT_ONCE = "all-at-once"
    FUSED = "fused"


class Place(StrEnum):
    """Memory of the arrays."""

    CPU = "cpu"
    SYMMETRIC = "symmetric"
    """As ``cpu``, but in memory that the ranks of a host share: see ``Communicator.empty``."""
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a collective.

    Attributes:
        reduces: it combines values, by an op.
        shares: a rank sends or gets one of n parts, so that the size must divide among them.
        factor: busbw / algbw among n ranks, as nccl-tests define it (their doc/PERFORMANCE.md).
    """

    reduces: bool
    shares: bool
    factor: Callable[[int], float]


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
    """One line of the report.

    Attributes:
        transport: kind of links, one of `TRANSPORT_NAMES`.
        strategy: name of the strategy.
        dtype: name of the element type.
        collective: the verb.
        op: how values are combined; None where they are not.
        workload: name of the workload; None for one tensor.
        mode: how the workload's tensors are exchanged; None for one tensor.
        nbytes: size of the message: of the largest buffer that a rank sends from or receives into.
        iterations: number of timed runs.
        warmup: number of runs before them.
    """

    transport: str
    strategy: str
    dtype: str
    collective: Verb
    op: Op | None
    workload: str | None
    mode: Mode | None
    nbytes: int
    iterations: int
    warmup: int

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
                "mode": None if mode is None else Mode(mode),
            }
        )


@dataclass(frozen=True, slots=True)
class Suite:
    """Options of a benchmark; every combination is measured.

    Attributes:
        collectives: the verbs to measure at each of ``sizes``.
        sizes: bytes of the messages; see `Case.nbytes`.
        workloads: names of the workloads to measure, by all_reduce, in each of ``modes``.
        modes: how their tensors are exchanged.
        strategies: names of strategies.
        transports: kinds of links, of `TRANSPORT_NAMES`.
        dtypes: names of element types.
        op: how values are combined.
        iterations: timed runs of each case; None for as many as its size makes reasonable.
        warmup: runs before them.
        blocking: measure ``kfcomm.sync`` instead of the asynchronous interface.
        device: memory of the arrays.
    """

    collectives: tuple[Verb, ...] = (Verb.ALL_REDUCE,)
    sizes: tuple[int, ...] = (1 << 10, 1 << 20)
    workloads: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = tuple(Mode)
    strategies: tuple[str, ...] = ("auto",)
    transports: tuple[str, ...] = ("auto",)
    dtypes: tuple[str, ...] = ("float32",)
    op: Op = Op.SUM
    iterations: int | None = None
    warmup: int = 3
    blocking: bool = False
    device: Place = Place.CPU

    @property
    def is_on_device(self) -> bool:
        """Whether the arrays are in the memory of devices."""
        return self.device is Place.GPU

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
                kernel(self.op, element)
        for verb, nbytes, dtype in itertools.product(self.collectives, self.sizes, self.dtypes):
            if not _rounded(verb, nbytes, dtype, size):
                parts = f" for each of {size} ranks" if COLLECTIVES[verb].shares else ""
                raise ConfigError(f"size {show_size(nbytes)}: {verb} needs at least one {dtype}{parts}")

    def cases(self, size: int) -> list[Case]:
        """All cases, in the order in which they are measured; those of one transport follow each other."""
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
        for name, kind in (("collectives", Verb), ("modes", Mode)):
            fields[name] = map(kind, fields[name])
        for name in ("collectives", "sizes", "workloads", "modes", "strategies", "transports", "dtypes"):
            fields[name] = tuple(fields[name])
        return cls(**{**fields, "op": Op(fields["op"]), "device": Place(fields["device"])})


def _rounded(verb: Verb, nbytes: int, dtype: str, size: int) -> int:
    """``nbytes`` without what makes no whole element, for each rank where they have a part each."""
    unit = dtype_of(dtype).itemsize * (size if COLLECTIVES[verb].shares else 1)
    return nbytes // unit * unit
