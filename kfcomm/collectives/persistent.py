"""Forms of the verbs: persistent collectives, and an all_reduce that records its throughput.

The arguments of a persistent collective are given once, and each start exchanges the current contents of the arrays, as
with ``MPI_Allreduce_init`` and similar calls (MPI 4.0, 6.13; 3.9 for messages). Here a start is a call of the verb
under the same name: other ranks may make that call instead. The first start is the verb itself, with all of its checks.
If the name is compiled then, later starts need no look-up and no checks.

Invariants: at most one use is in flight; a start that is refused leaves it alone.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import numpy as np

from kfcomm.arrays.on_device import is_on_device
from kfcomm.collectives.compiled import NO_ARRAY, Compiled, CompiledKey, CompiledUse
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle, looked_at, named
from kfcomm.collectives.messages import Messages
from kfcomm.collectives.specs import ALL_REDUCE, SPECS, Arguments, CallOptions, checked_priority
from kfcomm.common.arguments import checked_name
from kfcomm.common.sizes import seconds_of
from kfcomm.engine.meter import Meter
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.types import Op, Seconds, Verb, override

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.repeated import Launched
    from kfcomm.collectives.slot_use import Over, SlotUse
    from kfcomm.engine.operation import Operation


T = TypeVar("T")


class Timed(Handle[T]):
    """Handle that reports to a meter, at completion, the time since the post."""

    __slots__ = ("_nbytes", "_posted_s", "_under")

    def begin(self, group: Group, meter: Meter, nbytes: int, strategy: AnyStrategy | None) -> None:
        """Note the time of the post, and the strategy: that of the call, or else the one in force."""
        self._nbytes = nbytes
        self._under = meter.throughput(group.view, (strategy or group.strategy).name)
        self._posted_s = time.monotonic()

    @override
    def set_result(self, result: T) -> None:
        self._under.note(self._nbytes, time.monotonic() - self._posted_s)
        super().set_result(result)


class Monitored(Messages):
    """``monitored_all_reduce``, and all other verbs."""

    def monitored_all_reduce(
        self, x: Any, name: str | None = None, *, op: Any = Op.SUM, out: Any = None,
        timeout: Seconds | None = None, priority: int = 0, wire_dtype: Any = None, stream: Any = None,
        strategy: StrategySpec | None = None,
    ) -> Handle[Any]:  # fmt: skip
        """The same as ``all_reduce``, whose calls it meets on other ranks; its throughput on this rank is recorded.

        That is the bytes of ``x`` over the seconds from post to completion, under the strategy of the call, or else the
        one in force: see ``StrategyStatistics``, also for the reference, which means something if monitored calls are
        of one size: one in each step, say. Calls that fail are not recorded, and none are while monitoring is off.
        Cost: 1 µs more.
        """
        group = self._group
        meter = group.engine.meter
        if meter is None:
            return self.all_reduce(
                x, name, op=op, out=out, timeout=timeout, priority=priority, wire_dtype=wire_dtype, stream=stream,
                strategy=strategy,
            )  # fmt: skip
        handle: Timed[Any] = Timed(loop=group.engine.loop)
        options = CallOptions(op, None, out, timeout, priority, wire_dtype, stream, strategy=strategy)
        is_read = type(x) is np.ndarray
        if strategy is not None or not is_read:
            with self._checks(name, options, on_device=not is_read) as (name, options):
                x = x if is_read else self._devices.arrays.read(x, stream)
        nbytes = x.nbytes if is_read else x.flat.nbytes
        group.in_order(lambda: handle.begin(group, meter, nbytes, options.strategy))
        if timeout is None and wire_dtype is None and stream is None and strategy is None and not priority:
            again = self._again(x, name, (ALL_REDUCE, op), out, handle)
            if again is not None:
                return again
        return self._collective(ALL_REDUCE, x, name, options, handle)


P = ParamSpec("P")


class PersistentCollective(Generic[T]):
    """A collective, or a message, to be begun again and again with the same arrays: what ``*_init`` methods return.

    ::

        exchange = comm.all_reduce_init(gradient, name="grad", out=gradient)
        for step in range(1000):
            ...                      # fill the gradient
            await exchange.start()

    Each start is one use of the name, as a call of the verb would be, with what the arrays hold then; they are not to
    be modified before it is over. On other ranks it meets starts and plain calls alike. After a failure, or a
    cancellation, it can be started again. Use it on the event loop of its communicator only.

    Attributes:
        name: of the collective; None for one that takes the group's next number at each start, and for messages.

    Cost:
        A start checks no arguments and looks nothing up if ``x`` is a contiguous NumPy array, with ``out`` (if it is
        given) another one or ``x``, and without a timeout, a priority or a ``wire_dtype``, in a verb whose shapes every
        rank knows by itself; else it costs what the verb does. With ``out`` nothing is allocated.
    """

    __slots__ = (
        "_among", "_call", "_group", "_latest", "_new_handle", "_strategy", "_title", "_use", "_used", "name",
    )  # fmt: skip

    def __init__(self, comm: Monitored, verb: Callable[..., Handle[T]], given: inspect.BoundArguments) -> None:
        self.name: str | None = given.arguments.get("name")
        self._group = comm._group
        self._title = verb.__name__ if self.name is None else f"{verb.__name__} {self.name!r}"
        self._call: Callable[[], Handle[T]] = partial(verb, *given.args, **given.kwargs)
        self._used = _used(verb.__name__, given.arguments)
        self._strategy: StrategySpec | None = given.arguments.get("strategy")
        self._use: CompiledUse | None = None
        self._among: dict[CompiledKey, Compiled] = {}
        """Where the use was found: it holds for as long as the group has that dictionary."""
        self._new_handle: Callable[[], Handle[T] | None] = partial(Handle, loop=comm._group.engine.loop)
        """Makes None for a caller who looks at the operation itself, as in ``kfcomm.sync``."""
        never: Handle[T] = Handle(loop=comm._group.engine.loop)
        never.set_exception(ConfigError(f"{self._title} was never started: call start() first"))
        looked_at(never)
        self._latest: Handle[T] | Operation | SlotUse | Over | Launched = never

    def __repr__(self) -> str:
        return f"<PersistentCollective {self._title}, {'not ' if self.done() else ''}in flight>"

    def start(self) -> Self:
        """Begin the next use, at this place in the program; returns itself, to be awaited.

        Raises:
            ConfigError: the latest start is still in flight, and goes on: the other ranks notice nothing. Or the
                arguments cannot work: it fails on the other ranks, too, as a call of the verb does.
            SessionClosed: the communicator is closed.
        """
        if not self._latest.done():
            raise ConfigError(f"{self._title} is still in flight: wait for it, or cancel it, and start it then")
        use = self._use
        if use is not None and self._among is self._group.compiled:
            handle = self._new_handle()
            operation = use.start(handle)
            if operation is not None:
                self._latest = operation if handle is None else named(handle, operation)
                return self
        self._latest = self._call()
        if self._used is not None:
            self._among = self._group.compiled
            compiled = self._among.get(self._group.compiled_key(self.name, self._strategy))
            self._use = None if compiled is None else compiled.use(*self._used)
        return self

    def __await__(self) -> Generator[Any, None, T]:
        return cast("Handle[T]", self._latest).__await__()

    wait = Handle.wait
    """Refused: it is awaited."""

    def done(self) -> bool:
        """Whether nothing is in flight: the latest start is over, or there was none (as ``MPI_Test`` has it)."""
        return self._latest.done()

    def result(self) -> T:
        """The result of the latest start.

        Raises:
            ConfigError: it was never started.
            asyncio.InvalidStateError: it is still in flight.
            CollectiveError, asyncio.CancelledError: it has failed, or was cancelled.
        """
        return cast("T", self._latest.result())

    def cancel(self) -> bool:
        """End the latest start on every rank where it is not complete; False if nothing is in flight."""
        return self._latest.cancel()


def _used(verb: str, given: dict[str, Any]) -> tuple[Any, Arguments, Any] | None:
    """Arguments to look up a cached plan with; None if the verb itself is always called."""
    spec = SPECS.get(cast("Verb", verb))  # a verb equals its name
    if spec is None or given["priority"] or given.get("concat") or given.get("shared"):
        return None
    if any(given.get(option) is not None for option in ("timeout", "wire_dtype", "weight", "stream")):
        return None
    x = given.get("x", NO_ARRAY)
    if type(x) is not np.ndarray and not is_on_device(x):
        return None
    return x, spec.arguments(given.get("op"), given.get("root")), given.get("out")


def persistent(
    verb: Callable[Concatenate[Monitored, P], Handle[T]],
) -> Callable[Concatenate[Monitored, P], PersistentCollective[T]]:
    """The ``*_init`` method of a verb, with its parameters."""
    signature = inspect.signature(verb)

    def init(self: Monitored, /, *args: P.args, **kwargs: P.kwargs) -> PersistentCollective[T]:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        self._check_open()
        if "name" in given.arguments:
            given.arguments["name"] = checked_name(given.arguments["name"])
        seconds_of(given.arguments["timeout"])
        given.arguments["priority"] = checked_priority(given.arguments["priority"])
        return PersistentCollective(self, verb, given)

    init.__name__ = f"{verb.__name__}_init"
    init.__qualname__ = f"Persistent.{init.__name__}"
    init.__doc__ = f"""Prepare a ``{verb.__name__}``, to be started again and again; nothing is begun yet.

Returns a ``PersistentCollective``: each of its starts is one call of the verb. Only the name, the timeout and the
priority are checked here; what else is wrong with the arguments is raised by the first start, as by the verb, which
says:

{inspect.getdoc(verb)}"""
    init.__dict__["__signature__"] = signature.replace(return_annotation=PersistentCollective.__name__)
    return init


class Persistent(Monitored):
    """The persistent form of every verb that has one in MPI, of those that are made of them, and all other verbs.

    Verbs for objects have none: objects are packed anew at each call, so that there is nothing to prepare.
    """

    all_reduce_init = persistent(Monitored.all_reduce)
    """Prepare an ``all_reduce``."""
    all_reduce_many_init = persistent(Monitored.all_reduce_many)
    """Prepare an ``all_reduce_many``; each start takes the arrays that the mapping holds then."""
    monitored_all_reduce_init = persistent(Monitored.monitored_all_reduce)
    """Prepare a ``monitored_all_reduce``."""
    reduce_init = persistent(Monitored.reduce)
    """Prepare a ``reduce``."""
    broadcast_init = persistent(Monitored.broadcast)
    """Prepare a ``broadcast``."""
    gather_init = persistent(Monitored.gather)
    """Prepare a ``gather``."""
    all_gather_init = persistent(Monitored.all_gather)
    """Prepare an ``all_gather``."""
    scatter_init = persistent(Monitored.scatter)
    """Prepare a ``scatter``."""
    reduce_scatter_init = persistent(Monitored.reduce_scatter)
    """Prepare a ``reduce_scatter``."""
    all_to_all_init = persistent(Monitored.all_to_all)
    """Prepare an ``all_to_all``."""
    barrier_init = persistent(Monitored.barrier)
    """Prepare a ``barrier``."""
    consensus_init = persistent(Monitored.consensus)
    """Prepare a ``consensus``."""
    send_init = persistent(Monitored.send)
    """Prepare a ``send``; each start sends one message."""
    recv_init = persistent(Monitored.recv)
    """Prepare a ``recv``; each start receives the next message."""
