"""The blocking communicator: the verbs of ``kfcomm.Communicator`` for programs without an event loop.

Every method may be called from any thread, by many at once. A call that blocks does the work of the engine itself; an
I/O thread does it while none does; sub-groups share it. Calls of one thread are posted in the order of the calls.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from kfcomm.arrays.devices.routes import Choice
from kfcomm.collectives.blobs import as_array
from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.common.tracebacks import bare, terse
from kfcomm.errors import KfcommError, SessionClosed
from kfcomm.joining import Init, is_full, prepare
from kfcomm.monitor.whereabouts import program_line
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.settings import Arguments
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.sync.again import again
from kfcomm.sync.driver import Driver
from kfcomm.sync.signals import Signals
from kfcomm.sync.skin import ARRAY, MANY, OBJECT, OBJECTS, PARTS, PLAIN, Skin, begun, blocking, plain, prepared
from kfcomm.sync.thread import IoThread
from kfcomm.sync.tracebacks import outermost
from kfcomm.transports.shm.heap import Array
from kfcomm.types import Layout, Seconds, Verb
from kfcomm.world.communicator import Communicator as Async

if TYPE_CHECKING:
    from kfcomm.engine.network import Exchange
    from kfcomm.monitor import Statistics
    from kfcomm.rendezvous.settings import Settings


class Communicator(Skin[Async]):
    """The collectives of one group of ranks, blocking. Made by ``kfcomm.sync.init``, ``group`` and ``split``.

    Each verb has the parameters, the result and the errors of the async one. Its ``*_async`` form returns a
    ``kfcomm.sync.Handle`` instead of waiting. On the I/O thread itself (in a handle's callback) the blocking forms
    raise ``WouldDeadlock``; on a thread that runs an event loop of its own they block that loop.

    Cost: the caller does the work itself, over every link, without a hand-over to another thread. Only what has steps
    of its own (``group``, ``split``, ``probe``, ``request``, queues) goes by way of the I/O thread: 25 to 50 µs.
    """

    def __init__(self, driver: Driver, inner: Async, *, owns_io: bool = False) -> None:
        super().__init__(driver, inner, inner)
        self._owns_io = owns_io
        if owns_io:
            atexit.register(self._close_at_exit)

    def __repr__(self) -> str:
        return repr(self._inner)

    # ---------------------------------------------------------------- collectives

    all_reduce = again(blocking(Async.all_reduce, ARRAY), Verb.ALL_REDUCE)
    """Every rank gets ``x[0] ∘ x[1] ∘ ...``, element by element."""
    all_reduce_async = begun(Async.all_reduce, ARRAY)
    """Begin an ``all_reduce``."""
    all_reduce_many = blocking(Async.all_reduce_many, MANY)
    """``all_reduce`` of every value under its key as the name."""
    all_reduce_many_async = begun(Async.all_reduce_many, MANY)
    """Begin an ``all_reduce_many``."""
    monitored_all_reduce = blocking(Async.monitored_all_reduce, ARRAY)
    """An ``all_reduce`` whose throughput is recorded."""
    monitored_all_reduce_async = begun(Async.monitored_all_reduce, ARRAY)
    """Begin a ``monitored_all_reduce``."""
    reduce = again(blocking(Async.reduce, ARRAY), Verb.REDUCE)
    """Rank ``root`` gets what ``all_reduce`` would give; the others get None."""
    reduce_async = begun(Async.reduce, ARRAY)
    """Begin a ``reduce``."""
    broadcast = again(blocking(Async.broadcast, ARRAY), Verb.BROADCAST)
    """Every rank gets the ``x`` of rank ``root``."""
    broadcast_async = begun(Async.broadcast, ARRAY)
    """Begin a ``broadcast``."""
    gather = again(blocking(Async.gather, ARRAY), Verb.GATHER)
    """Rank ``root`` gets the arrays of all ranks; the others get None."""
    gather_async = begun(Async.gather, ARRAY)
    """Begin a ``gather``."""
    all_gather = again(blocking(Async.all_gather, ARRAY), Verb.ALL_GATHER)
    """Every rank gets the arrays of all ranks."""
    all_gather_async = begun(Async.all_gather, ARRAY)
    """Begin an ``all_gather``."""
    scatter = blocking(Async.scatter, PARTS)
    """Rank r gets the r-th part of the root's array."""
    scatter_async = begun(Async.scatter, PARTS)
    """Begin a ``scatter``."""
    reduce_scatter = again(blocking(Async.reduce_scatter, ARRAY), Verb.REDUCE_SCATTER)
    """Rank r gets the r-th part of what ``all_reduce`` would give."""
    reduce_scatter_async = begun(Async.reduce_scatter, ARRAY)
    """Begin a ``reduce_scatter``."""
    all_to_all = again(blocking(Async.all_to_all, PARTS), Verb.ALL_TO_ALL)
    """Rank i gets the i-th part of every rank's ``x``."""
    all_to_all_async = begun(Async.all_to_all, PARTS)
    """Begin an ``all_to_all``."""
    barrier = again(blocking(Async.barrier), Verb.BARRIER)
    """Returns when every rank has called it."""
    barrier_async = begun(Async.barrier)
    """Begin a ``barrier``."""
    consensus = blocking(Async.consensus, ARRAY)
    """Whether all ranks hold the same: arrays, numbers, strings, bytes, dicts, lists or sets."""
    consensus_async = begun(Async.consensus, ARRAY)
    """Begin a ``consensus``."""

    # ---------------------------------------------------------------- objects

    broadcast_object = blocking(Async.broadcast_object)
    """Every rank gets the root's ``value``."""
    broadcast_object_async = begun(Async.broadcast_object, OBJECT)
    """Begin a ``broadcast_object``."""
    all_gather_object = blocking(Async.all_gather_object)
    """Every rank gets the list of all ranks' values."""
    all_gather_object_async = begun(Async.all_gather_object, OBJECT)
    """Begin an ``all_gather_object``."""
    gather_object = blocking(Async.gather_object)
    """Rank ``root`` gets the list of all ranks' values; the others get None."""
    gather_object_async = begun(Async.gather_object, OBJECT)
    """Begin a ``gather_object``."""
    scatter_object = blocking(Async.scatter_object)
    """Rank r gets ``values[r]`` of the root's list."""
    scatter_object_async = begun(Async.scatter_object, OBJECTS)
    """Begin a ``scatter_object``."""

    # ---------------------------------------------------------------- between two ranks

    send = blocking(Async.send, ARRAY)
    """Send an array to rank ``to``; returns when that rank has received it."""
    send_async = begun(Async.send, ARRAY)
    """Begin a ``send``."""
    recv = blocking(Async.recv)
    """The next message with this tag from rank ``source``, or from any rank."""
    recv_async = begun(Async.recv)
    """Begin a ``recv``."""
    recv_any = blocking(Async.recv_any)
    """As ``recv``; returns ``(array, rank of the sender)``."""
    recv_any_async = begun(Async.recv_any)
    """Begin a ``recv_any``."""
    send_object = blocking(Async.send_object)
    """Send anything that msgpack can carry to rank ``to``."""
    send_object_async = begun(Async.send_object, OBJECT)
    """Begin a ``send_object``."""
    recv_object = blocking(Async.recv_object)
    """The next object with this tag from rank ``source``, or from any rank."""
    recv_object_async = begun(Async.recv_object)
    """Begin a ``recv_object``."""
    request = blocking(Async.request)
    """A copy of what rank ``source`` saved as ``name``."""
    request_async = begun(Async.request)
    """Begin a ``request``."""

    @outermost
    def save(self, name: str, x: Any, *, version: int | None = None) -> int:
        """Keep a copy of ``x`` for others to ``request``; returns its version. See ``kfcomm.Communicator.save``."""
        self._check_open()
        kept = plain(as_array(x))
        return self._driver.run(lambda: self._inner.save(name, kept, version=version), self._session)

    @outermost
    def queue(self, name: str, source: int, target: int, *, capacity: int = 16) -> Queue:
        """An ordered queue of arrays from rank ``source`` to ``target``. See ``kfcomm.Communicator.queue``."""
        return Queue(self._driver, self._inner.queue(name, source, target, capacity=capacity), self._inner)

    # ---------------------------------------------------------------- to be started again and again

    all_reduce_init = prepared(Async.all_reduce_init)
    """Prepare an ``all_reduce``."""
    all_reduce_many_init = prepared(Async.all_reduce_many_init)
    """Prepare an ``all_reduce_many``; each start takes the arrays that the mapping holds then."""
    monitored_all_reduce_init = prepared(Async.monitored_all_reduce_init)
    """Prepare a ``monitored_all_reduce``."""
    reduce_init = prepared(Async.reduce_init)
    """Prepare a ``reduce``."""
    broadcast_init = prepared(Async.broadcast_init)
    """Prepare a ``broadcast``."""
    gather_init = prepared(Async.gather_init)
    """Prepare a ``gather``."""
    all_gather_init = prepared(Async.all_gather_init)
    """Prepare an ``all_gather``."""
    scatter_init = prepared(Async.scatter_init)
    """Prepare a ``scatter``."""
    reduce_scatter_init = prepared(Async.reduce_scatter_init)
    """Prepare a ``reduce_scatter``."""
    all_to_all_init = prepared(Async.all_to_all_init)
    """Prepare an ``all_to_all``."""
    barrier_init = prepared(Async.barrier_init)
    """Prepare a ``barrier``."""
    consensus_init = prepared(Async.consensus_init)
    """Prepare a ``consensus``."""
    send_init = prepared(Async.send_init)
    """Prepare a ``send``; each start sends one message."""
    recv_init = prepared(Async.recv_init)
    """Prepare a ``recv``; each start receives the next message."""

    # ---------------------------------------------------------------- when a rank dies

    agree = blocking(Async.agree)
    """The conjunction of what all ranks that live say, whoever dies meanwhile."""
    agree_async = begun(Async.agree)
    """Begin an ``agree``."""

    @outermost
    def shrink(self, *, timeout: Seconds | None = None) -> Communicator:
        """The communicator of the next epoch, that of the ranks that live. See ``kfcomm.Communicator.shrink``."""
        self._check_open()
        inner = self._io.wait_for(lambda: self._inner.shrink(timeout=timeout))
        return Communicator(self._driver, inner, owns_io=self._owns_io)

    # ---------------------------------------------------------------- groups and graphs

    set_strategy = blocking(Async.set_strategy)
    """Change the graphs of this group while it works."""
    set_strategy_async = begun(Async.set_strategy)
    """Begin a ``set_strategy``."""

    @outermost
    def group(
        self, ranks: Iterable[int], name: str = "group", *, strategy: StrategySpec | None = None,
        timeout: Seconds | None = None,
    ) -> Communicator:  # fmt: skip
        """A communicator of some of this group's ranks, on the same I/O thread. See ``kfcomm.Communicator.group``."""
        self._check_open()
        members = tuple(ranks)
        inner = self._io.wait_for(lambda: self._inner.group(members, name, strategy=strategy, timeout=timeout))
        return Communicator(self._driver, inner)

    @outermost
    def split(
        self, color: int | str | None, key: int = 0, name: str = "split", *, timeout: Seconds | None = None
    ) -> Communicator | None:
        """A communicator of the ranks that give the same ``color``. See ``kfcomm.Communicator.split``."""
        self._check_open()
        inner = self._io.wait_for(lambda: self._inner.split(color, key, name, timeout=timeout))
        return None if inner is None else Communicator(self._driver, inner)

    @outermost
    def set_timeout(self, timeout: Seconds) -> None:
        """Calls of this group that follow have this timeout. See ``kfcomm.Communicator.set_timeout``."""
        self._inner.set_timeout(timeout)

    @outermost
    def refuse(self, name: str | None, error: BaseException, *, steps: int = 1) -> None:
        """This rank's next call of this name is not made. See ``kfcomm.Communicator.refuse``."""
        self._check_open()
        self._driver.run(lambda: self._inner.refuse(name, error, steps=steps), self._session)

    @outermost
    def mismatched(self, name: str, seq: int, message: str) -> None:
        """One use of a name fails, on every rank. See ``kfcomm.Communicator.mismatched``."""
        self._driver.run(lambda: self._inner.mismatched(name, seq, message), self._session)

    # ---------------------------------------------------------------- who and where

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._inner.name

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._inner.size

    @property
    def local_rank(self) -> int:
        """Rank of this process among those of the group on its host."""
        return self._inner.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks of the group on this host."""
        return self._inner.local_size

    @property
    def layout(self) -> Layout:
        """Hosts of the ranks of the group."""
        return self._inner.layout

    @property
    def epoch(self) -> int:
        """Number of the membership."""
        return self._inner.epoch

    @property
    def births(self) -> tuple[int, ...]:
        """The rank that each rank of the group had in the first epoch."""
        return self._inner.births

    @property
    def outlives(self) -> bool:
        """Whether collectives outlive a rank that is lost: while an ``Elastic`` is open."""
        return self._inner.outlives

    @property
    def strategy(self) -> AnyStrategy:
        """The strategy in force in this group."""
        return self._inner.strategy

    @property
    def route(self) -> Choice | None:
        """Which way device memory goes in this group, and why; None in a world where no rank has a device."""
        return self._inner.route

    # ---------------------------------------------------------------- diagnosis and the end

    synchronize = blocking(Async.synchronize)
    """Wait until every collective of device memory is complete."""
    synchronize_async = begun(Async.synchronize)
    """Begin to wait for that."""

    probe = blocking(Async.probe)
    """Measure latency and bandwidth between every two ranks, in both directions."""
    probe_async = begun(Async.probe)
    """Begin a ``probe``."""

    @property
    def shares_memory(self) -> bool:
        """Whether ``empty`` gives memory that the other ranks can read. See ``kfcomm.Communicator.shares_memory``."""
        return self._inner.shares_memory

    @outermost
    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
        """An array that the other ranks of this host can read where it is. See ``kfcomm.Communicator.empty``."""
        return self._inner.empty(shape, dtype)

    @outermost
    def dump(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """What this process did last and waits for, as a JSON-able record; written to ``path`` if given."""
        return self._inner.dump(path)

    def statistics(self) -> Statistics:
        """What was counted and timed so far. See ``kfcomm.Communicator.statistics``."""
        return self._inner.statistics()

    def close(self) -> None:
        """End it: of the world, everything is closed; of a sub-group, only this view of it. Never hangs.

        What the library has put off (updates of ``kfcomm.torch.attach``) is finished first, unless an exception leaves
        ``with``. What else is in flight fails, here and, where it was not complete, on the other ranks. Calling it
        again, or in a forked child, does nothing. A world that is still open when the interpreter ends is closed then.
        For how long it waits for other ranks: see ``kfcomm.Communicator.close``. Ctrl-C meanwhile ends the wait, and so
        does what a signal handler raises.

        Raises:
            WouldDeadlock: called on the I/O thread.
            CollectiveError: what was put off has failed; it is closed all the same.
        """
        if self._io.is_inherited or self._io.is_stopped:
            return
        try:
            self._driver.put_off.finish(None if self._owns_io else self._inner)
        finally:
            self._close()

    def _close(self) -> None:
        if self._io.signals.hold():
            self._io.signals.holding(self._close, ())
            return
        if self._owns_io:
            exit_report.report_leaving()
        self._driver.heal(self._session)
        try:
            self._finish()
        except BaseException:  # Ctrl-C, or what a signal handler has raised
            with contextlib.suppress(SessionClosed):
                self._io.post(self._session.hang_up)
            self._finish()
            raise

    def _finish(self) -> None:
        with contextlib.suppress(SessionClosed):
            # another thread closes it too, and was faster
            self._io.wait_for(self._inner.close)
        if self._owns_io:
            self._driver.stop()
            atexit.unregister(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._hurry()
        self.close()

    def _hurry(self) -> None:
        self._driver.put_off.forget()
        with contextlib.suppress(SessionClosed):
            self._io.post(self._session.hurry)

    def _close_at_exit(self) -> None:
        """The program ends without ``close``: the others shall hear a goodbye rather than lose a peer."""
        if hasattr(sys, "last_type"):  # by an error, or by Ctrl-C
            self._hurry()
        with contextlib.suppress(KfcommError, OSError):
            self.close()


class Queue(Skin[AsyncQueue]):
    """One end of an ordered, bounded queue of arrays between two ranks; see ``Communicator.queue``."""

    put = blocking(AsyncQueue.put, PLAIN)
    """Append a copy of ``x``; waits while ``capacity`` arrays have not been taken."""
    put_async = begun(AsyncQueue.put, PLAIN)
    """Begin a ``put``; ``x`` is not to be modified before the handle is done."""
    get = blocking(AsyncQueue.get)
    """The next array, as NumPy."""
    get_async = begun(AsyncQueue.get)
    """Begin a ``get``."""


def init(**arguments: Unpack[Arguments]) -> Communicator:
    """Join the world that this process was started in; alone it is a world of one. Blocks until all have joined.

    Use as ``with kfcomm.sync.init() as comm`` or ``comm = kfcomm.sync.init()``. Arguments, environment and errors are
    those of ``kfcomm.init``.

    Returns:
        A ``Communicator``; with ``elastic=True`` a ``kfcomm.sync.ElasticCommunicator``.

    Raises:
        ConfigError: the settings cannot work.
        RendezvousError: the peers do not find or accept each other.
    """
    is_held = (signals := Signals()).hold()
    shown: Callable[[KfcommError], KfcommError] = terse  # code of a plugin may take part in what is checked
    try:
        settings = prepare(**arguments)
        shown = bare
        return join(settings, signals=signals)
    except KfcommError as error:
        raise error if is_full(arguments) or error is signals.raised else shown(error)
    finally:
        if is_held:
            signals.let_go()


def join(
    settings: Settings, exchange: Exchange | None = None, *, signals: Signals | None = None
) -> Communicator:  # fmt: skip
    """As ``init``, with settings that are there.

    Args:
        settings: what was found.
        exchange: how the ranks learn of each other, if not by a store of kfcomm's.
        signals: that the caller holds; None to have them held here.
    """
    signals = Signals() if signals is None else signals
    if signals.hold():
        return signals.holding(join, (settings, exchange), {"signals": signals})
    kind: Any = Communicator
    if settings.elastic:
        from kfcomm.sync.elastic import ElasticCommunicator  # which others do without, and newcomers need at once

        kind = ElasticCommunicator  # it has all that one has
    driver = Driver(IoThread(signals), is_terse=settings.traceback == "short")
    try:
        inner = driver.io.wait_for(lambda: Init(settings, driver.reactor, exchange))
        inner._session.where = program_line  # blocking calls are made at the lines at which their threads stay
        made: Communicator = kind(driver, inner, owns_io=True)
        return made
    except BaseException:
        driver.stop()
        raise
