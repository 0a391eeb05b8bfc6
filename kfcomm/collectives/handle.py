"""Handle of a collective under way, and errors where it is used in place of its result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kfcomm.core.collective import shown
from kfcomm.errors import ConfigError, EpochChanged, PeerLost
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kfcomm.collectives.on_device.repeated import Launched
    from kfcomm.collectives.receives import Receive
    from kfcomm.collectives.slot_use import Over, SlotUse
    from kfcomm.engine.operation import Operation
    from kfcomm.transports.reactor import Reactor


OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "divmod": "divmod()", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
"""Of two operands; as people write them."""
OTHERS = {
    "neg": "-", "pos": "+", "abs": "abs()", "invert": "~", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "int": "int()", "float": "float()", "complex": "complex()", "index": "an index",
    "round": "round()", "len": "len()", "iter": "iteration", "contains": "in", "getitem": "[]", "setitem": "[]",
    "array": "an array",
}  # fmt: skip
ATTRIBUTES = (
    "shape", "dtype", "ndim", "size", "nbytes", "T", "real", "imag", "device", "item", "tolist", "sum", "mean", "max",
    "min", "std", "any", "all", "norm", "numpy", "cpu", "to", "detach", "astype", "view", "reshape", "ravel", "flatten",
    "copy", "copy_", "add_", "mul_", "div_", "items", "keys", "values", "get", "decode",
)  # fmt: skip


class Unawaited:
    """Results' operators and attributes on a handle: raise TypeError or AttributeError, and name the remedy.

    A handle keeps its truth value, as every future does: programs write ``handle or other``, and pass handles to code
    that asks whether there is one.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return True

    def __format__(self, spec: str) -> str:
        return _refused("a format")(self) if spec else str(self)

    def _remedy(self) -> str:
        """Text of the error, with the remedy."""
        return "await it first, y = await handle"


def _title(handle: Any) -> str:
    """Title of its call, as far as that is known: a finished call has no operation."""
    verb, name = getattr(handle, "verb", ""), ""
    operation = getattr(handle, "operation", None)
    series = getattr(getattr(operation, "collective", operation), "series", None)
    if series is not None:
        verb, name = getattr(series.signature, "verb", ""), f" {shown(series.key.name)}"
    return f"the handle of {verb or 'a collective'}{name}"


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{what} needs a result, got {_title(self)}: {self._remedy()}")

    return refuse


class _Attribute:
    """An attribute of arrays and other results."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, handle: Any, owner: type) -> Any:
        if handle is None:
            return self
        text = f"{_title(handle)} has no {self._name!r}, but its result may: {handle._remedy()}"
        raise AttributeError(text, name=self._name, obj=handle)


for _name, _sign in OPERATORS.items():
    for _form in (_name, f"r{_name}", f"i{_name}"):
        setattr(Unawaited, f"__{_form}__", _refused(_sign))
for _name, _sign in OTHERS.items():
    setattr(Unawaited, f"__{_name}__", _refused(_sign))
for _name in ATTRIBUTES:
    setattr(Unawaited, _name, _Attribute(_name))


T = TypeVar("T")


class Handle(Unawaited, asyncio.Future[T]):
    """A collective under way: ``await`` it, look at ``done()``, or ``cancel()`` it.

    Cancelling ends the collective on every rank where it is not complete yet; there it raises
    ``CollectiveAborted``. A receive ends on this rank alone, and leaves its message to the next one. Cancelling the
    task that awaits a handle cancels the handle.

    Attributes:
        operation: what is under way, for as long as there is something to cancel.
    """

    # Neither is set from the start: an ``__init__`` of its own would double the time it takes to make a future.
    __slots__ = ("_seq", "operation")

    operation: Operation | SlotUse | Over | Launched | Receive | None
    _listeners: list[Callable[[Any], object]] | None = None

    contributors: tuple[int, ...] | None = None
    """Uids of the ranks whose contributions are in the result; known where calls outlive a rank (``Elastic``)."""

    @property
    def seq(self) -> int:
        """Sequence number of this use of its name; -1 until it has begun or was refused."""
        return getattr(self, "_seq", -1)

    @seq.setter
    def seq(self, seq: int) -> None:
        self._seq = seq

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            operation = getattr(self, "operation", None)
            if operation is not None:
                operation.look_at_once()
        return super().__await__()

    def cancel(self, msg: Any | None = None) -> bool:
        """End the collective everywhere, a receive here alone; False if it is complete already."""
        if not super().cancel(msg):
            return False
        operation = getattr(self, "operation", None)
        if operation is not None:
            operation.cancel()
        self._tell_listeners()
        return True

    def give_up(self) -> None:
        """Cancel it after an interrupt of its caller; a message that it already holds goes to the next receive."""
        self.cancel()

    @override
    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        if self._listeners:
            self._tell_listeners()

    @override
    def set_exception(self, error: type[BaseException] | BaseException, /) -> None:
        super().set_exception(error)
        if self._listeners:
            self._tell_listeners()

    def wait(self, timeout: Any = None) -> NoReturn:
        """Nothing can wait on an event loop without stopping it.

        Raises:
            ConfigError: always; it says what to write instead.
        """
        raise ConfigError(
            "an asynchronous handle has no wait(): write await handle, or await asyncio.wait_for(handle, seconds); "
            "handles of the *_async verbs of kfcomm.sync have a wait()"
        )

    def when_done(self, reactor: Reactor, callback: Callable[[Handle[T]], object]) -> None:
        """Call back from the reactor when it is over, in the thread that drives the engine, with or without a loop."""
        if self.done():
            reactor.call_soon(callback, self)
            return
        self._listen(lambda done: reactor.call_soon(callback, done))

    def _when_cancelled(self, callback: Callable[[], object]) -> None:
        """Call back within ``cancel``, so that what is begun after that finds nothing of this call under way."""
        if self.cancelled():
            callback()
        elif not self.done():
            self._listen(lambda done: callback() if done.cancelled() else None)

    def _listen(self, listener: Callable[[Any], object]) -> None:
        if self._listeners is None:
            self._listeners = []
        self._listeners.append(listener)

    def _tell_listeners(self) -> None:
        listeners, self._listeners = self._listeners, None
        for listener in listeners or ():
            listener(self)


def named(handle: Handle[T], operation: Operation | SlotUse | Over | Launched) -> Handle[T]:
    """The handle of an operation that was posted under it."""
    handle._seq = operation.seq
    if not operation.is_over:
        handle.operation = operation
    return handle


def join(reactor: Reactor, handles: Sequence[Handle[Any]], whole: Handle[T], result: Callable[[], T]) -> None:
    """Complete ``whole`` with ``result()`` when all handles are done.

    If one fails, or ``whole`` is cancelled, the others are cancelled; the first error is raised once all have ended.
    The loss of a rank, or the end of an epoch, ends all of them by itself, on every rank.
    """
    left = len(handles)
    errors: list[BaseException] = []

    def one_done(done: Handle[Any]) -> None:
        nonlocal left
        left -= 1
        error = None if done.cancelled() else done.exception()
        if error is not None:
            errors.append(error)
            if not isinstance(error, (PeerLost, EpochChanged)):
                give_up()
        if left or whole.done():
            return
        if errors:
            whole.set_exception(errors[0])
        elif any(handle.cancelled() for handle in handles):
            whole.cancel()
        else:
            whole.set_result(result())

    def give_up() -> None:
        for handle in handles:
            handle.cancel()

    whole._when_cancelled(give_up)
    for handle in handles:
        handle.when_done(reactor, one_done)


def looked_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the error, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()
