"""Procedures: the algorithm of an agreement, written once for both interfaces as a generator of calls.

A *procedure* yields calls of a communicator's verbs and is sent their results. It knows neither a loop nor a thread, so
it needs no second form, and tests can run the procedures of all ranks against each other without a network. `Pending`
runs one over a communicator: the first call is made at once; the rest is awaited with a communicator of
``kfcomm.init``, and waited for with one of ``kfcomm.sync``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.types import Seconds


def report(comm: Comm, values: Mapping[str, float], units: Mapping[str, str] | None = None) -> None:
    """Show the latest value of each figure of training, such as ``loss`` or ``noise_scale``, where monitoring is on.

    They are in ``statistics().gauges``, at the Prometheus endpoint, in ``kfcomm top``, on the dashboard and in the
    timeline. It costs no message. Any thread may call it.

    Args:
        comm: communicator of either interface.
        values: numbers by name; those of other names stay.
        units: for the timeline, by name.
    """
    engine = comm._session.engine
    if engine.meter is not None:
        engine.meter.gauges.update(values)
    for observer in engine.observers or ():
        for name, value in values.items():
            observer.counter(name, (units or {}).get(name, ""), value)


P = ParamSpec("P")
T = TypeVar("T")

Comm: TypeAlias = Any
"""A communicator of either interface, elastic or not."""


def epoch_of(comm: Comm) -> int:
    """Return the number of the membership of a communicator; 0 of one whose ranks never change."""
    epoch: int = getattr(comm, "epoch", 0)
    return epoch


def is_elastic(comm: Comm) -> bool:
    """Whether the ranks of a communicator can change, so that what is made over it has to follow their number."""
    return hasattr(comm, "propose_size")


class ProcedureCall(NamedTuple):
    """A call of a verb."""

    verb: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    is_begun: bool = False  # the procedure continues at once with a handle, which it yields later for the result


Procedure: TypeAlias = Generator[Any, Any, T]
"""It yields `Call`s, and handles of those that were only begun."""


def call(verb: str, *args: Any, **options: Any) -> ProcedureCall:
    """A call of a verb of the communicator."""
    return ProcedureCall(verb, args, options)


def together(calls: Iterable[ProcedureCall]) -> Procedure[list[Any]]:
    """The results of several calls that are under way at once; if one fails, the others are cancelled."""
    handles: list[Any] = []
    results: list[Any] = []
    try:
        for one in calls:
            handle = yield one._replace(is_begun=True)
            handles.append(handle)
        for handle in handles:
            result = yield handle
            results.append(result)
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return results


class HasCommunicator(Protocol):
    """Base of classes with procedures as methods."""

    comm: Comm


A = TypeVar("A", bound=HasCommunicator)


def carried(
    procedure: Callable[Concatenate[A, P], Procedure[T]],
) -> Callable[Concatenate[A, P], Pending[T]]:
    """Turn a procedure into a method that begins it, over the communicator of its object."""

    @wraps(procedure)
    def begin(self: A, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return Pending(self.comm, procedure(self, *args, **kwargs))

    return begin


class Pending(Generic[T]):
    """A procedure under way: its first call has been made.

    With a communicator of ``kfcomm.init``: ``await`` it, as often as you like; it goes on by itself. With one of
    ``kfcomm.sync``: ``wait()`` for it; what has several calls makes the next while somebody waits, or asks ``done()``.
    """

    _under_way: Any = None
    _error: BaseException | None = None

    def __init__(self, comm: Comm, procedure: Procedure[T]) -> None:
        self._comm = comm
        self._procedure = procedure
        self._is_blocking = hasattr(comm, "all_reduce_async")
        self._result: Any = None
        self._task: asyncio.Task[T] | None = None
        self._advance(partial(next, procedure))
        if self._error is not None:
            raise self._error  # of the arguments
        if not self._is_blocking and self._under_way is not None:
            self._task = asyncio.get_running_loop().create_task(self._to_the_end())
            self._task.add_done_callback(self._abandon)

    def __await__(self) -> Generator[Any, None, T]:
        if self._is_blocking:
            raise ConfigError("with a communicator of kfcomm.sync nothing is awaited: write wait()")
        if self._task is None:
            return self._told()
        return (yield from self._task)

    def wait(self, timeout: Seconds | None = None) -> T:
        """Wait for the result and return it.

        Args:
            timeout: seconds to wait here for each of its calls; they go on after them. None: as long as their own
                timeouts let them.

        Raises:
            TimeoutError: it is not done yet, and has not failed.
            ConfigError: its communicator is one to be awaited.
            CollectiveError: a call failed.
        """
        if not self._is_blocking:
            raise ConfigError("with a communicator of kfcomm.init this is awaited: write await")
        while (handle := self._under_way) is not None:
            with contextlib.suppress(concurrent.futures.CancelledError):
                handle.exception(timeout)
            self._settle(handle)
        return self._told()

    def done(self) -> bool:
        """Whether it is over."""
        if self._task is not None:
            return self._task.done()
        while self._under_way is not None and self._under_way.done():
            self._settle(self._under_way)
        return self._under_way is None

    def cancel(self) -> bool:
        """End the call that is under way, on every rank, and make no other; return False if it is over."""
        if self._task is not None:
            return self._task.cancel()
        return self._under_way is not None and bool(self._under_way.cancel())

    async def _to_the_end(self) -> T:
        while (handle := self._under_way) is not None:
            try:
                result = await handle
            except BaseException as error:  # noqa: BLE001  the procedure gets it, and raises it or another
                self._advance(partial(self._procedure.throw, error))
            else:
                self._advance(partial(self._procedure.send, result))
        return self._told()

    def _abandon(self, _: asyncio.Future[T]) -> None:
        # A task that is cancelled before its first turn has not come to its handle, and so has not cancelled it.
        if self._under_way is not None:
            self._under_way.cancel()

    def _settle(self, handle: concurrent.futures.Future[Any]) -> None:
        """Send the outcome of a blocking call to the procedure, and make its next call."""
        try:
            result = handle.result()
        except Exception as error:  # noqa: BLE001  the procedure gets it, and raises it or another
            self._advance(partial(self._procedure.throw, error))
        else:
            self._advance(partial(self._procedure.send, result))

    def _advance(self, step: Callable[[], Any]) -> None:
        """Make the next call that is not over at once; or note the end."""
        self._under_way = None
        while True:
            try:
                wanted = step()
            except StopIteration as end:
                self._result = end.value
                return
            except BaseException as error:  # noqa: BLE001  whoever waits has it
                self._error = error
                return
            try:
                made = self._make(wanted) if isinstance(wanted, ProcedureCall) else wanted
            except Exception as error:  # noqa: BLE001  of the arguments
                step = partial(self._procedure.throw, error)
                continue
            is_begun = isinstance(wanted, ProcedureCall) and wanted.is_begun
            if hasattr(made, "add_done_callback") and not is_begun:
                self._under_way = made
                return
            step = partial(self._procedure.send, made)

    def _make(self, wanted: ProcedureCall) -> Any:
        """A handle, or the result of a verb without handles."""
        verb = getattr(self._comm, wanted.verb)
        if self._is_blocking:
            verb = getattr(self._comm, f"{wanted.verb}_async", verb)
        made = verb(*wanted.args, **wanted.options)
        return asyncio.ensure_future(made) if inspect.iscoroutine(made) else made

    def _told(self) -> T:
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result
