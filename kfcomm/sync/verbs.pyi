# Written by `python -m tests.sync.stub` from the signatures of the asyncio verbs: change those, and run it.
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kfcomm.arrays.devices.routes import Choice
from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.collectives.messages import Tag
from kfcomm.monitor import Statistics
from kfcomm.probe import Probe
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.handle import Handle, PersistentCollective
from kfcomm.transports.shm.heap import Array
from kfcomm.types import Layout, Op, Seconds
from kfcomm.world.communicator import Communicator as Async

class BlockingVerbs(Adapter[Async]):
    """Blocking forms of the verbs of ``kfcomm.Communicator``."""

    def all_reduce(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        shared: bool = False,
        weight: float | None = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Every rank gets ``x[0] ∘ x[1] ∘ ...``, element by element; the same bits on every rank."""

    def all_reduce_async(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        shared: bool = False,
        weight: float | None = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin an ``all_reduce``."""

    def all_reduce_many(
        self,
        arrays: Mapping[str, Any],
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Mapping[str, Any] | None = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        weight: float | None = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> dict[str, Any]:
        """``all_reduce`` of every value of a mapping in few collectives: arrays of one dtype travel together."""

    def all_reduce_many_async(
        self,
        arrays: Mapping[str, Any],
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Mapping[str, Any] | None = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        weight: float | None = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[dict[str, Any]]:
        """Begin an ``all_reduce_many``."""

    def reduce(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank ``root`` gets what ``all_reduce`` would give; the others get None. See ``all_reduce``."""

    def reduce_async(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``reduce``."""

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Every rank gets the ``x`` of rank ``root``."""

    def broadcast_async(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``broadcast``."""

    def reduce_scatter(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank r gets the r-th of ``size`` parts, along the first axis, of what ``all_reduce`` would give."""

    def reduce_scatter_async(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``reduce_scatter``."""

    def barrier(
        self,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> None:
        """Done when every rank has called it; see ``all_reduce``."""

    def barrier_async(
        self,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[None]:
        """Begin a ``barrier``."""

    def gather(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        concat: bool = False,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank ``root`` gets the arrays of all ranks; the others get None."""

    def gather_async(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        concat: bool = False,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``gather``."""

    def all_gather(
        self,
        x: Any,
        name: str | None = None,
        *,
        concat: bool = False,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Every rank gets the arrays of all ranks; see ``gather``, and ``broadcast`` for ``wire_dtype``."""

    def all_gather_async(
        self,
        x: Any,
        name: str | None = None,
        *,
        concat: bool = False,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin an ``all_gather``."""

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        name: str | None = None,
        *,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank r gets the r-th part, along the first axis, of the root's array."""

    def scatter_async(
        self,
        x: Any = None,
        root: int = 0,
        name: str | None = None,
        *,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``scatter``."""

    def all_to_all(
        self,
        x: Any,
        name: str | None = None,
        *,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank i gets the i-th part of every rank's ``x``, in rank order."""

    def all_to_all_async(
        self,
        x: Any,
        name: str | None = None,
        *,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin an ``all_to_all``."""

    def broadcast_object(
        self,
        value: Any = None,
        root: int = 0,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Every rank gets the root's ``value``: anything that msgpack can carry. Tuples arrive as lists."""

    def broadcast_object_async(
        self,
        value: Any = None,
        root: int = 0,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``broadcast_object``."""

    def all_gather_object(
        self,
        value: Any,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Every rank gets the list of all ranks' values."""

    def all_gather_object_async(
        self,
        value: Any,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin an ``all_gather_object``."""

    def gather_object(
        self,
        value: Any,
        root: int = 0,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank ``root`` gets the list of all ranks' values; the others get None."""

    def gather_object_async(
        self,
        value: Any,
        root: int = 0,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``gather_object``."""

    def scatter_object(
        self,
        values: Sequence[Any] | None = None,
        root: int = 0,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Rank r gets ``values[r]`` of the root's list; the other ranks' is ignored."""

    def scatter_object_async(
        self,
        values: Sequence[Any] | None = None,
        root: int = 0,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``scatter_object``."""

    def send(
        self,
        x: Any,
        to: int | None = None,
        tag: Tag = 0,
        *,
        dest: int | None = None,
        synchronous: bool = False,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> None:
        """Send an array to rank ``to``; done when it may be modified again."""

    def send_async(
        self,
        x: Any,
        to: int | None = None,
        tag: Tag = 0,
        *,
        dest: int | None = None,
        synchronous: bool = False,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> Handle[None]:
        """Begin a ``send``."""

    def recv(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> Any:
        """The next message with this tag from rank ``source``, or from any rank."""

    def recv_async(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> Handle[Any]:
        """Begin a ``recv``."""

    def recv_any(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> tuple[Any, int]:
        """As ``recv``; the result is ``(array, rank of the sender)``."""

    def recv_any_async(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> Handle[tuple[Any, int]]:
        """Begin a ``recv_any``."""

    def send_object(
        self,
        value: Any,
        to: int | None = None,
        tag: Tag = 0,
        *,
        dest: int | None = None,
        synchronous: bool = False,
        timeout: Seconds | None = None,
        priority: int = 0,
    ) -> None:
        """Send anything that msgpack can carry to rank ``to`` (or ``dest``), for its ``recv_object``; see ``send``."""

    def send_object_async(
        self,
        value: Any,
        to: int | None = None,
        tag: Tag = 0,
        *,
        dest: int | None = None,
        synchronous: bool = False,
        timeout: Seconds | None = None,
        priority: int = 0,
    ) -> Handle[None]:
        """Begin a ``send_object``."""

    def recv_object(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        timeout: Seconds | None = None,
        priority: int = 0,
    ) -> Any:
        """The next object with this tag from rank ``source`` (or ``src``), or from any rank."""

    def recv_object_async(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        timeout: Seconds | None = None,
        priority: int = 0,
    ) -> Handle[Any]:
        """Begin a ``recv_object``."""

    def consensus(
        self,
        x: Any,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """Whether all ranks hold the same; a handle of a bool. Cost: 32 bytes per rank."""

    def consensus_async(
        self,
        x: Any,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``consensus``."""

    def monitored_all_reduce(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Any:
        """The same as ``all_reduce``, whose calls it meets on other ranks; its throughput on this rank is recorded."""

    def monitored_all_reduce_async(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:
        """Begin a ``monitored_all_reduce``."""

    def all_reduce_init(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        shared: bool = False,
        weight: float | None = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare an ``all_reduce``, to be started repeatedly."""

    def all_reduce_many_init(
        self,
        arrays: Mapping[str, Any],
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Mapping[str, Any] | None = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        weight: float | None = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[dict[str, Any]]:
        """Prepare an ``all_reduce_many``, to be started repeatedly."""

    def monitored_all_reduce_init(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``monitored_all_reduce``, to be started repeatedly."""

    def reduce_init(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``reduce``, to be started repeatedly."""

    def broadcast_init(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``broadcast``, to be started repeatedly."""

    def gather_init(
        self,
        x: Any,
        root: int = 0,
        name: str | None = None,
        *,
        concat: bool = False,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``gather``, to be started repeatedly."""

    def all_gather_init(
        self,
        x: Any,
        name: str | None = None,
        *,
        concat: bool = False,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare an ``all_gather``, to be started repeatedly."""

    def scatter_init(
        self,
        x: Any = None,
        root: int = 0,
        name: str | None = None,
        *,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``scatter``, to be started repeatedly."""

    def reduce_scatter_init(
        self,
        x: Any,
        name: str | None = None,
        *,
        op: Any = Op.SUM,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        wire_dtype: Any = None,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``reduce_scatter``, to be started repeatedly."""

    def all_to_all_init(
        self,
        x: Any,
        name: str | None = None,
        *,
        out: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare an ``all_to_all``, to be started repeatedly."""

    def barrier_init(
        self,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[None]:
        """Prepare a ``barrier``, to be started repeatedly."""

    def consensus_init(
        self,
        x: Any,
        name: str | None = None,
        *,
        timeout: Seconds | None = None,
        priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``consensus``, to be started repeatedly."""

    def send_init(
        self,
        x: Any,
        to: int | None = None,
        tag: Tag = 0,
        *,
        dest: int | None = None,
        synchronous: bool = False,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> PersistentCollective[None]:
        """Prepare a ``send``, to be started repeatedly."""

    def recv_init(
        self,
        source: int | None = None,
        tag: Tag = 0,
        *,
        src: int | None = None,
        out: Any = None,
        like: Any = None,
        timeout: Seconds | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> PersistentCollective[Any]:
        """Prepare a ``recv``, to be started repeatedly."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of the group on its host."""

    @property
    def local_size(self) -> int:
        """Number of ranks of the group on this host."""

    @property
    def layout(self) -> Layout:
        """Hosts of the ranks of the group."""

    @property
    def epoch(self) -> int:
        """Number of the membership."""

    @property
    def births(self) -> tuple[int, ...]:
        """The rank that each rank of the group had in the first epoch: who it is, whatever its number is now."""

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force in this group."""

    @property
    def route(self) -> Choice | None:
        """Route of device memory in this group, with the reason; None where no rank has a device."""

    def agree(self, value: Any, *, timeout: Seconds | None = None) -> Any:
        """Fault-tolerant logical AND: the same result on all surviving ranks, even if some die during the call."""

    def agree_async(self, value: Any, *, timeout: Seconds | None = None) -> Handle[Any]:
        """Begin an ``agree``."""

    def set_strategy(self, strategy: StrategySpec, *, timeout: Seconds | None = None) -> None:
        """Change the graphs of this group while it works; every rank calls it, at the same place in its program."""

    def set_strategy_async(self, strategy: StrategySpec, *, timeout: Seconds | None = None) -> Handle[None]:
        """Begin a ``set_strategy``."""

    @property
    def shares_memory(self) -> bool:
        """Whether there are several ranks in this group, on one host, that share the memory in which ``empty`` is."""

    def synchronize(self) -> None:
        """Wait until every collective of device memory that this rank has begun in this group is complete there."""

    def synchronize_async(self) -> Handle[None]:
        """Begin a ``synchronize``."""

    def probe(self, *, nbytes: int = 1048576, rounds: int = 3, timeout: Seconds | None = None) -> Probe:
        """Measure latency and bandwidth between every two ranks, in both directions; every rank calls it."""

    def probe_async(self, *, nbytes: int = 1048576, rounds: int = 3, timeout: Seconds | None = None) -> Handle[Probe]:
        """Begin a ``probe``."""

    def dump(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Record of this process's latest calls and waits, fit for JSON; written to ``path`` if given."""

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
        """An array of unknown content that the other ranks of this host can read where it is (*symmetric memory*)."""

    def set_timeout(self, timeout: Seconds) -> None:
        """Calls of this group that follow have this timeout, unless they are given one; this rank's alone."""

    def statistics(self) -> Statistics:
        """Counts and times so far: bytes by peer and link, calls by key, waits by rank."""

class Queue(Adapter[AsyncQueue]):
    """One end of an ordered, bounded queue of arrays between two ranks; see ``Communicator.queue``."""

    def put(self, x: Any, *, timeout: Seconds | None = None) -> None:
        """Append a copy of ``x``; waits while ``capacity`` arrays have not been taken."""

    def put_async(self, x: Any, *, timeout: Seconds | None = None) -> Handle[None]:
        """Begin a ``put``."""

    def get(self, *, out: Any = None, like: Any = None, timeout: Seconds | None = None) -> Any:
        """The next array, as NumPy's, of the kind of ``like``, or in ``out``; see ``recv``, also for the errors."""

    def get_async(self, *, out: Any = None, like: Any = None, timeout: Seconds | None = None) -> Handle[Any]:
        """Begin a ``get``."""
