"""From an asynchronous verb to its blocking forms: the signature is taken over, the caller drives the engine.

Arrays and objects are read on the caller's thread, so that the loop never waits for a device or a large copy. After
a ``*_async`` verb has returned, the caller may change what it gave, except where the async verb says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np

from kfcomm.arrays import adapt, holds_arrays, is_list
from kfcomm.arrays.on_device import OnStream, current_stream, is_on_device
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.errors import KfcommError
from kfcomm.sync.handle import Handle
from kfcomm.sync.tracebacks import outermost

if TYPE_CHECKING:
    from kfcomm.collectives.persistent import PersistentCollective as AsyncPersistent
    from kfcomm.sync.driver import Driver
    from kfcomm.sync.persistent import PersistentCollective
    from kfcomm.world.communicator import Communicator

A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given:
    """The parameter of a verb, its first, that holds data; ``read`` takes it on the caller's thread."""

    name: str
    read: Callable[[Any], Any]

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments with the data read. What cannot be read stays: the verb refuses it, and tells the others."""
        try:
            if args:
                return (self.read(args[0]), *args[1:])
            if self.name in kwargs:
                kwargs[self.name] = self.read(kwargs[self.name])
        except Exception:  # noqa: BLE001  the caller's object may raise anything
            pass
        return args


def _read_array(x: Any) -> Any:
    """An array whose memory is the caller's own needs no reading: the verb takes it as it is."""
    if is_list(x) and holds_arrays(x):
        return _read_parts(x)
    return x if type(x) is np.ndarray and x.flags.c_contiguous else _read(x)


def _read(x: Any) -> Any:
    """Of an array on a device its stream is read, which depends on the thread."""
    return OnStream(x, current_stream(x)) if is_on_device(x) else adapt(x)


def _read_parts(x: Any) -> Any:
    if x is None:
        return None
    if not is_list(x):
        return _read_array(x)
    parts = [_read(part) for part in x]
    return tuple(parts) if isinstance(x, tuple) else parts


def _read_many(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _read(x) for name, x in arrays.items()}


def _read_object(value: Any) -> Any:
    return unpacked(packed(value))


def plain(x: Any) -> Any:
    """An array of any kind as NumPy's."""
    array = adapt(x)
    return array.flat.reshape(array.shape)


ARRAY = Given("x", _read_array)
PARTS = Given("x", _read_parts)
PLAIN = Given("x", plain)
MANY = Given("arrays", _read_many)
OBJECT = Given("value", _read_object)
OBJECTS = Given("values", _read_object)


class Skin(Generic[A_co]):
    """Something asynchronous that belongs to a communicator, and the driver of that one's engine."""

    def __init__(self, driver: Driver, inner: A_co, comm: Communicator) -> None:
        self._driver = driver
        self._io = driver.io
        self._inner = inner
        self._session = comm._session
        self._check_open = comm._check_open
        """Refuses at once, on the caller's thread, what a closed or inherited communicator would refuse."""


def blocking(
    verb: Callable[Concatenate[A_co, P], Awaitable[T]], given: Given | None = None
) -> Callable[Concatenate[Skin[A_co], P], T]:
    """The form of ``verb`` that returns its result.

    What has several steps of its own, a coroutine, runs on the I/O thread; all else is done by the caller.
    """
    is_coroutine = inspect.iscoroutinefunction(verb)

    def call(self: Skin[A_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        is_held = self._io.signals.hold()
        try:
            self._check_open()
            begin: Callable[[], Any] = _bound(verb, given, self, args, kwargs)
            result: T = self._io.wait_for(begin) if is_coroutine else self._driver.call(begin, self._session)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()
        return result

    return _dressed(call, verb.__name__, verb, "Blocks until the result is there, and returns it.")


def begun(
    verb: Callable[Concatenate[A_co, P], Awaitable[T]], given: Given | None = None
) -> Callable[Concatenate[Skin[A_co], P], Handle[T]]:
    """The form of ``verb`` that returns a handle at once."""
    is_coroutine, name = inspect.iscoroutinefunction(verb), verb.__name__

    def call(self: Skin[A_co], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        is_held = self._io.signals.hold()
        try:
            self._check_open()
            begin: Callable[[], Any] = _bound(verb, given, self, args, kwargs)
            handle: Handle[T] = Handle(self._driver, self._session)
            handle.verb = name
            if is_coroutine:
                handle.start(begin)
            else:
                self._driver.run(lambda: handle.begin(begin), self._session)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._io.signals.let_go()
        return handle

    lead = "Begins, and returns a ``kfcomm.sync.Handle``; errors of the arguments come from it, too."
    return _dressed(call, f"{verb.__name__}_async", verb, lead)


def prepared(
    init: Callable[Concatenate[A_co, P], AsyncPersistent[T]],
) -> Callable[Concatenate[Skin[A_co], P], PersistentCollective[T]]:
    """The form of an ``*_init`` method whose starts are waited for."""

    @outermost
    def call(self: Skin[A_co], /, *args: P.args, **kwargs: P.kwargs) -> PersistentCollective[T]:
        from kfcomm.sync.persistent import PersistentCollective

        return PersistentCollective(self._driver, self._session, init(self._inner, *args, **kwargs))

    return _dressed(call, init.__name__, init, "Returns a ``kfcomm.sync.PersistentCollective``.")


def _bound(
    verb: Callable[..., Awaitable[T]], given: Given | None, skin: Skin[Any], args: tuple[Any, ...], kwargs: Any
) -> Callable[[], Awaitable[T]]:
    if given is not None:
        args = given.take(args, kwargs)
    return partial(verb, skin._inner, *args, **kwargs)


def _dressed(call: Callable[P, T], name: str, verb: Callable[..., Any], lead: str) -> Callable[P, T]:
    """What ``help`` and editors show: the verb's parameters and its text, after what differs."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{lead}\n\n{inspect.getdoc(verb)}"
    call.__dict__["__signature__"] = inspect.signature(verb).replace(return_annotation=inspect.Signature.empty)
    return call
