"""Blocking forms of asyncio verbs, derived from the verbs' own signatures.

Arrays and objects are read on the caller's thread, so that the loop never waits for a device or a large copy. After
a ``*_async`` verb has returned, the caller may change what it gave, except where the asyncio verb says otherwise.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np

from kfcomm.arrays import adapt, holds_arrays, is_list
from kfcomm.arrays.on_device import OnStream, current_stream, is_on_device
from kfcomm.collectives.compiled import NO_ARRAY, NOT_ALIKE
from kfcomm.collectives.handle import Handle as Inner
from kfcomm.collectives.handle import named
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.collectives.specs import SPECS, VerbSpec
from kfcomm.errors import KfcommError
from kfcomm.sync.driver import outermost
from kfcomm.sync.handle import Handle, PersistentCollective
from kfcomm.sync.signals import NUMBERS, getsignal
from kfcomm.types import Verb

if TYPE_CHECKING:
    from kfcomm.collectives.compiled import Compiled
    from kfcomm.collectives.persistent import PersistentCollective as AsyncPersistent
    from kfcomm.collectives.specs import Arguments
    from kfcomm.sync.driver import Driver
    from kfcomm.world.communicator import Communicator

A_co = TypeVar("A_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GivenArgument:
    """The first parameter of a verb, which holds data; ``read`` reads that on the caller's thread."""

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
    """Of arrays on devices the verb reads the stream itself: it is called on the caller's thread."""
    return (
        dict(arrays)
        if any(map(is_on_device, islice(arrays.values(), 1)))
        else {name: _read(x) for name, x in arrays.items()}
    )


def _read_object(value: Any) -> Any:
    # A copy: the program may change the object before it is sent.
    return unpacked(packed(value))


def plain(x: Any) -> Any:
    """Return an array of any kind as NumPy's."""
    array = adapt(x)
    return array.flat.reshape(array.shape)


_GIVEN = {
    given.name: given
    for given in (
        GivenArgument("x", _read_array),
        GivenArgument("arrays", _read_many),
        GivenArgument("value", _read_object),
        GivenArgument("values", _read_object),
    )
}
_GIVEN_TO = {
    "scatter": GivenArgument("x", _read_parts),
    "all_to_all": GivenArgument("x", _read_parts),
    "put": GivenArgument("x", plain),
}
"""By verb, where the name of the parameter does not say how its data is read."""


@cache
def _signature(verb: Callable[..., Any]) -> inspect.Signature:
    """Of all forms of a verb; made once, since that is most of what it costs to import them."""
    return inspect.signature(verb).replace(return_annotation=inspect.Signature.empty)


def _given_to(verb: Callable[..., Any], *, is_awaited: bool) -> GivenArgument | None:
    """How the data of a verb is read; an object only where the call returns before it is packed."""
    first = [*_signature(verb).parameters, ""][1]
    is_object = verb.__name__.endswith("_object")
    if first.startswith("value") and (is_awaited or not is_object):
        return None
    return _GIVEN_TO.get(verb.__name__) or _GIVEN.get(first)


class Adapter(Generic[A_co]):
    """Blocking interface to an asyncio object of a communicator, through the driver of that one's engine."""

    def __init__(self, driver: Driver, inner: A_co, comm: Communicator) -> None:
        self._driver = driver
        self._io = driver.io
        self._inner = inner
        self._session = comm._session
        # Refuses at once, on the caller's thread, what a closed or inherited communicator would refuse.
        self._check_open = comm._check_open


def blocking(
    verb: Callable[Concatenate[A_co, P], Awaitable[T]],
) -> Callable[Concatenate[Adapter[A_co], P], T]:
    """Return the form of ``verb`` that waits for its result."""
    # A coroutine, which has several steps of its own, runs on the I/O thread; the caller does everything else.
    is_coroutine, given = inspect.iscoroutinefunction(verb), _given_to(verb, is_awaited=True)

    @outermost
    def call(self: Adapter[A_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_open()
        begin: Callable[[], Any] = _bound(verb, given, self, args, kwargs)
        result: T = self._io.wait_for(begin) if is_coroutine else self._driver.call(begin, self._session)
        return result

    return _dressed(call, verb.__name__, verb, "Blocks until the result is there, and returns it.")


def begun(
    verb: Callable[Concatenate[A_co, P], Awaitable[T]],
) -> Callable[Concatenate[Adapter[A_co], P], Handle[T]]:
    """Return the form of ``verb`` that returns a handle at once."""
    is_coroutine, name = inspect.iscoroutinefunction(verb), verb.__name__
    given = _given_to(verb, is_awaited=False)

    @outermost
    def call(self: Adapter[A_co], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        self._check_open()
        begin: Callable[[], Any] = _bound(verb, given, self, args, kwargs)
        handle: Handle[T] = Handle(self._driver, self._session)
        handle.verb = name
        if is_coroutine:
            handle.start(begin)
        else:
            self._driver.run(partial(handle.begin, begin), self._session)
        return handle

    lead = "Begins, and returns a ``kfcomm.sync.Handle``; errors of the arguments come from it, too."
    return _dressed(call, f"{verb.__name__}_async", verb, lead)


def prepared(
    init: Callable[Concatenate[A_co, P], AsyncPersistent[T]],
) -> Callable[Concatenate[Adapter[A_co], P], PersistentCollective[T]]:
    """Return the form of an ``*_init`` method whose persistent collective blocks."""

    @outermost
    def call(self: Adapter[A_co], /, *args: P.args, **kwargs: P.kwargs) -> PersistentCollective[T]:
        return PersistentCollective(self._driver, self._session, init(self._inner, *args, **kwargs))

    return _dressed(call, init.__name__, init, "Returns a ``kfcomm.sync.PersistentCollective``.")


# Parameters are written out for each verb: to find them among *args would cost each call what the fast path saves.
# Whatever is rarer is in **options, and takes the long form. Handlers of signals are compared in place: to ask `hold`
# at each call costs 40 bytecodes and a frame more.
HEAD = """\
def {verb}(self, /, {parameters}, **options):
    is_held = [*map(getsignal, NUMBERS)] != (signals := self._driver.signals).harmless and signals.hold()
    try:
        if {is_plain} and (compiled := self._inner._group.compiled.get(name)) is not None{is_alike}:
"""
WAITS = """\
            outcome = self._driver.call(compiled.start, self._session, {x}, {arguments}, {out}, None)
            if outcome is not NOT_ALIKE:
                return outcome
"""
BEGINS = """\
            handle = Handle(self._driver, self._session)
            handle.verb = verb
            begin = partial(again, self._io.loop, compiled, {x}, {arguments}, {out})
            if self._driver.run(partial(handle.begin, begin), self._session):
                return handle
"""
TAIL = """\
        return long_form(self, {given}, **options)
    except KfcommError as error:
        raise self._driver.shown(error)
    finally:
        if is_held:
            signals.let_go()
"""
PARAMETERS = ("x", "root", "name", "op", "out")
"""Those that cached calls may give, in the order of the verbs' signatures."""


def again(loop: asyncio.AbstractEventLoop, compiled: Compiled, *call: *tuple[Any, Arguments, Any]) -> Inner[Any] | None:
    """Begin a call like the one before; None, and nothing begun, if it is not."""
    inner: Inner[Any] = Inner(loop=loop)
    operation = compiled.start(*call, inner)
    return None if operation is None else named(inner, operation)


def cached(long_form: Callable[P, T], spec: VerbSpec, *, is_awaited: bool) -> Callable[P, T]:
    """Return a form of a verb, waiting or with a handle, that takes the fast path where it can, else ``long_form``."""
    found = inspect.signature(long_form).parameters
    takes = {name: found[name] for name in PARAMETERS if name in found}
    parameters = [f"{name}=defaults[{name!r}]" if name != "x" else name for name in takes]
    by_keyword = [name for name, one in takes.items() if one.kind is one.KEYWORD_ONLY]
    if by_keyword:
        parameters.insert(len(takes) - len(by_keyword), "*")
    arguments = [*(["op"] if spec.folds else ()), *(["type(root)", "root"] if spec.is_rooted else ())]
    # a handle has the error of a name that cannot be one
    tests = [
        "not options",
        *(() if is_awaited else ["type(name) is str"]),
    ]
    source = (HEAD + (WAITS if is_awaited else BEGINS) + TAIL).format(
        verb=long_form.__name__,
        parameters=", ".join(parameters),
        is_plain=" and ".join(tests),
        is_alike=" and (type(x) is ndarray or compiled.is_on_device)" if "x" in takes else "",
        x="x" if "x" in takes else "NO_ARRAY",
        arguments=f"(verb, {', '.join(arguments)})" if arguments else "only_verb",
        out="out" if "out" in takes else None,
        given=", ".join(f"{name}={name}" if name in by_keyword else name for name in takes),
    )
    names: dict[str, Any] = {
        "Handle": Handle, "KfcommError": KfcommError, "NOT_ALIKE": NOT_ALIKE, "NO_ARRAY": NO_ARRAY,
        "NUMBERS": NUMBERS, "again": again, "defaults": {name: one.default for name, one in takes.items()},
        "getsignal": getsignal, "long_form": long_form, "ndarray": np.ndarray, "only_verb": (spec.verb,),
        "partial": partial, "verb": spec.verb,
    }  # fmt: skip
    file = f"{__file__} {long_form.__name__}"  # begins as those of this package do: tracebacks and dumps go by that
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), names)
    return wraps(long_form)(names[long_form.__name__])


def derive(cls: type[Adapter[Any]], inner: type[Any], *, by_hand: Collection[str] = ()) -> None:
    """Give ``cls`` blocking forms of each member of ``inner``, which it wraps, that is awaited or a property."""
    # What the class has already stays. Coroutines ``by_hand`` have no form here: their results need one of their own.
    for name in dict.fromkeys(name for one in reversed(inner.__mro__) for name in vars(one)):
        member = inspect.getattr_static(inner, name)
        if name.startswith("_") or name in by_hand:
            continue
        if isinstance(member, property):
            forward(cls, inner, name)
        elif name.endswith("_init"):
            setattr(cls, name, prepared(member))
        elif is_awaited(member):
            waits, begins = blocking(member), begun(member)
            if name in SPECS:
                waits = cached(waits, SPECS[Verb(name)], is_awaited=True)
                begins = cached(begins, SPECS[Verb(name)], is_awaited=False)
            setattr(cls, name, waits)
            setattr(cls, f"{name}_async", begins)


def forward(cls: type[Any], inner: type[Any], *names: str) -> None:
    """Give ``cls`` properties and methods of ``inner``, which it wraps, that neither wait nor need another result."""
    for name in names:
        member = inspect.getattr_static(inner, name)
        if isinstance(member, property):
            setattr(cls, name, property(attrgetter(f"_inner.{name}"), doc=member.__doc__))
        else:
            setattr(cls, name, _forwarded(member))


def _forwarded(method: Callable[..., T]) -> Callable[..., T]:
    @outermost
    def call(self: Any, /, *args: Any, **kwargs: Any) -> T:
        return method(self._inner, *args, **kwargs)

    return _dressed(call, method.__name__, method, "Called at once, on the caller's thread.")


def is_awaited(member: Any) -> bool:
    """Whether this is a method whose result is to be awaited: a coroutine, or one that returns a handle."""
    if inspect.iscoroutinefunction(member):
        return True
    return inspect.isfunction(member) and str(member.__annotations__.get("return")).startswith(("Handle[", "Steps"))


def _bound(
    verb: Callable[..., Awaitable[T]],
    given: GivenArgument | None,
    adapter: Adapter[Any],
    args: tuple[Any, ...],
    kwargs: Any,
) -> Callable[[], Awaitable[T]]:
    if given is not None:
        args = given.take(args, kwargs)
    return partial(verb, adapter._inner, *args, **kwargs)


def _dressed(call: Callable[P, T], name: str, verb: Callable[..., Any], lead: str) -> Callable[P, T]:
    """Give a form the parameters and the text of its verb, which ``help`` shows, after a line on what differs."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{lead}\n\n{inspect.getdoc(verb)}"
    call.__dict__["__signature__"] = _signature(verb)
    return call
