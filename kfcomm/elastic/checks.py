"""Checks of the values in a state, on assignment and at each boundary between two steps.

A state is sent to joining ranks and written to a checkpoint. A value that cannot be sent is refused before that, with
its path. Two values never share a path: keys are compared as plain values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import index
from typing import Any, TypeAlias

from kfcomm.arrays import adapt
from kfcomm.arrays.kinds import is_array_type
from kfcomm.collectives.objects import packed, unpacked
from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError

Path: TypeAlias = tuple["str | int | MappingKey", ...]

MAX_DEPTH = 64
"""Depth of nested containers; msgpack carries some hundreds, which a state shares with the message around it."""
_PLAIN: frozenset[type] = frozenset({float, bool, bytes, type(None)})
_known: set[tuple[type, Any]] = set()
"""Types and dtypes of arrays that were adapted without an error before."""


class MappingKey:
    """Key of a mapping, as a part of a path; the index in a list is a plain ``int``."""

    __slots__ = ("plain",)

    def __init__(self, plain: Any) -> None:
        self.plain = plain


class Unfit(Exception):
    """Error: a value cannot be in a state."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[Any] = []  # its keys and indices, from the innermost container outwards
        self.why = why


def check(value: Any, name: str, *, is_quick: bool = False) -> None:
    """Refuse a value that cannot be in a state, or that contains such a value."""
    # The quick check, of the type and dtype of arrays, takes 0.2 µs for each value; the full one 1 µs for each array.
    try:
        if not _is_known(value, is_quick):
            _check(value, MAX_DEPTH, is_quick)
    except Unfit as unfit:
        path = shown((name, *reversed(unfit.path)))
        raise ConfigError(f"{path:.300} cannot be in a state: {unfit.why}") from None


def plain_key(key: Any) -> Any:
    """Return a key as a plain value for msgpack: the text or number of a subclass of ``str`` or ``int``."""
    if type(key) is str or isinstance(key, (bool, bytes, type(None))):
        return key
    for kind in (str, int, float):
        if isinstance(key, kind):
            return getattr(kind, "__str__" if kind is str else f"__{kind.__name__}__")(key)
    raise Unfit(
        f"it has the key {key!r:.60}, a {type(key).__name__}; keys are text, bytes, numbers, bools or None: "
        "give list(x.items())"
    )


def order_of(key: Any) -> Any:
    """Return the sort key of a mapping's key, number or text; the order is the same on all ranks."""
    plain = plain_key(key)
    return type(plain).__name__, plain


def shown(path: Path) -> str:
    """Format a path: ``best['a'][0]``."""
    steps = (one.plain if isinstance(one, MappingKey) else one for one in path[1:])
    return str(path[0]) + "".join(f"[{one!r}]" for one in steps)


def sendable(text: str) -> str:
    """Escape text that is not valid UTF-8, such as some file names, for msgpack."""
    return text.encode(errors="backslashreplace").decode()


def unreadable(what: str, error: Exception) -> str:
    """Text, for the other ranks, of an error that an array of the caller has raised."""
    return sendable(f"{what} cannot be read: {str(error) or repr(error)}")


def _check(value: Any, depth: int, is_quick: bool) -> None:
    kind: Any = type(value)
    if kind is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise Unfit("it is an integer of more than 64 bits: give str(x)")
    elif isinstance(value, (Mapping, list, tuple)):
        if not depth:
            raise Unfit(f"it is nested more than {MAX_DEPTH} deep, or holds itself")
        if isinstance(value, Mapping):
            _check_keys(value)
        if _are_plain(value.values() if isinstance(value, Mapping) else value):
            return
        for where, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            if not _is_known(one, is_quick):
                _check_at(where, one, value, depth - 1, is_quick)
    elif is_array_type(kind):
        _check_array(value)
    elif not _is_known(value, is_quick):
        _check_leaf(value)


def _are_plain(values: Collection[Any]) -> bool:
    """Whether all are plain values; fast for long lists, such as the losses of all steps so far."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    if kinds == {int}:
        return bool(min(values) >= -(1 << 63) and max(values) < 1 << 64)
    return kinds == {str} and "".join(values).isascii()


def _is_known(value: Any, is_quick: bool) -> bool:
    """Whether a value is of a usual kind, which needs no further check. Most of the time goes here."""
    kind = type(value)
    if kind in _PLAIN or (kind is str and value.isascii()):
        return True
    return is_quick and (kind, getattr(value, "dtype", None)) in _known


def _check_at(where: Any, value: Any, container: Any, depth: int, is_quick: bool) -> None:
    try:
        _check(value, depth, is_quick)
    except Unfit as unfit:
        unfit.path.append(MappingKey(where) if isinstance(container, Mapping) else where)
        raise


def _check_keys(value: Mapping[Any, Any]) -> None:
    kinds = set(map(type, value))
    if kinds != {str} or not "".join(value).isascii():
        for key in value:
            _check_key(key)
        if kinds - {str, int} and len(set(map(order_of, value))) != len(value):
            raise Unfit("two of its keys are equal as text or numbers")


def _check_key(key: Any) -> None:
    plain = plain_key(key)
    if plain != plain:  # not a number
        raise Unfit("it has the key nan, which equals no key")
    _check_leaf(plain)


def _check_leaf(value: Any) -> None:
    try:
        unpacked(packed(value))
    except ConfigError as error:
        raise Unfit(str(error)) from None


def _check_array(value: Any) -> None:
    try:
        adapt(value)
        _known.add((type(value), getattr(value, "dtype", None)))
    except TypeError:  # a dtype that cannot be looked up
        return
    except ConfigError as error:
        raise Unfit(str(error)) from None


def passes_of(passes: Any) -> int | None:
    """Check the argument ``passes`` of ``steps``."""
    try:
        return None if passes is None else index(passes)
    except TypeError:
        raise ConfigError(f"passes is a number of passes, or None, not {passes!r}") from None


def names_of(used_in: Any) -> list[str] | None:
    """Check the argument ``used_in`` of ``steps``; returns its names."""
    if used_in is None:
        return None
    given = [used_in] if isinstance(used_in, str) else used_in
    if not isinstance(given, Sequence | AbstractSet) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"used_in is the name of a call, or names, not {used_in!r}")
    names: dict[str, None] = dict.fromkeys(checked_name(one) for one in given)
    return sorted(names) if isinstance(given, AbstractSet) else list(names)
