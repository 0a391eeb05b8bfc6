"""Python objects: their msgpack encoding for the wire, and fingerprints to compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgpack
import numpy as np

from kfcomm.arrays import adapt, is_list
from kfcomm.arrays.kinds import TOO_DEEP, is_array_type
from kfcomm.common.arguments import plain_text
from kfcomm.errors import CollectiveError, ConfigError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_SCALARS = (str, bytes, bytearray, int, float, type(None))
_ADVICE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((set, frozenset), "give sorted(x) or list(x)"),
    ((np.generic,), "give x.item()"),
    ((complex,), "give [x.real, x.imag]"),
)


def packed(value: Any) -> Array:
    """Return the msgpack encoding of an object as bytes.

    Raises:
        ConfigError: it cannot be encoded; the message says where in ``value``, and what to give instead.
    """
    try:
        data = msgpack.packb(value)
        if not isinstance(value, _SCALARS):
            msgpack.unpackb(data, strict_map_key=False)  # keys may be what no dictionary takes where they come
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  the caller's object may raise anything
        raise ConfigError(_refusal(value, error)) from None
    return np.frombuffer(data, np.uint8)


def unpacked(flat: Any) -> Any:
    """Decode an object from the bytes of ``packed``."""
    try:
        return msgpack.unpackb(np.asarray(flat).tobytes(), strict_map_key=False)
    except (TypeError, ValueError) as error:
        raise CollectiveError(f"a peer's object cannot be read: {error}") from error


def fingerprint(x: Any) -> bytes:
    """Return 32 bytes that are the same for equal values on two ranks; see ``Communicator.consensus``.

    Raises:
        ConfigError: it is, or holds, something other than an array, number, string, bytes, None, dict, list or set;
            or it holds itself.
    """
    try:
        return _fingerprint(x)
    except RecursionError:
        raise ConfigError(f"this {type(x).__name__} cannot be compared: {TOO_DEEP}") from None


def _fingerprint(x: Any) -> bytes:
    if x is None or isinstance(x, (str, bytes)):
        if isinstance(x, str):
            return _hash("str", plain_text(x).encode(errors="surrogatepass"))
        return _hash("NoneType" if x is None else "bytes", x or b"")
    if isinstance(x, Mapping):
        return _hash("dict", b"".join(sorted(_fingerprint(key) + _fingerprint(one) for key, one in x.items())))
    if isinstance(x, (set, frozenset)):
        return _hash("set", b"".join(sorted(map(_fingerprint, x))))
    if is_list(x) and _shape(x) is None:
        return _hash("list", b"".join(map(_fingerprint, x)))
    array = adapt(x)
    return _hash(f"{array.dtype.name} {array.shape}", array.flat.view(np.uint8).data)


def _hash(about: str, data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=32, key=hashlib.sha256(about.encode()).digest()).digest()


def _shape(x: Any) -> tuple[int, ...] | None:
    """Shape of the array that nested lists of numbers form; None if they form none."""
    if not isinstance(x, (list, tuple)):
        return () if isinstance(x, (int, float, complex, np.generic)) else None
    shapes = set(map(_shape, x))
    if len(shapes) > 1 or None in shapes:
        return None
    return (len(x), *(shapes.pop() or ())) if shapes else (0,)


def _refusal(value: Any, error: Exception) -> str:
    try:
        found = _first(value, "")
    except RecursionError:
        return f"msgpack cannot carry this {type(value).__name__}: {TOO_DEEP}"
    except Exception:  # noqa: BLE001  as above
        found = None
    if found is None:
        why = TOO_DEEP if "recursion" in str(error) else str(error) or type(error).__name__
        return f"msgpack cannot carry this {type(value).__name__}: {why}"[:500]
    where, what, instead = found
    return f"msgpack cannot carry {f'value{where}' if where else 'this value'}, {what}: {instead}"[:500]


def _first(value: Any, where: str) -> tuple[str, str, str] | None:
    """Describe the first object in ``value`` that cannot be encoded: where, its type, and what to give instead."""
    if isinstance(value, dict):
        return _first_in_dict(value, where)
    if isinstance(value, (list, tuple)):
        found = (_first(one, f"{where}[{place}]") for place, one in enumerate(value))
        return next((one for one in found if one is not None), None)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return where, "an integer of more than 64 bits", "give str(x)"
    if isinstance(value, _SCALARS):
        return None
    kind = type(value).__name__
    return where, f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}", _advice(value)


def _first_in_dict(value: dict[Any, Any], where: str) -> tuple[str, str, str] | None:
    for key, one in value.items():
        if isinstance(key, (tuple, frozenset)):
            return where, f"a dict with the key {key!r:.60}, a {type(key).__name__}", "give list(x.items())"
        found = _first(key, f"{where}.keys()") or _first(one, f"{where}[{key!r:.60}]")
        if found is not None:
            return found
    return None


def _advice(value: Any) -> str:
    kind: type = type(value)
    if is_array_type(kind):
        return "give x.tolist(), or send the array by itself"
    for types, instead in _ADVICE:
        if isinstance(value, types):
            return instead
    return "give dict(x)" if isinstance(value, Mapping) else "give what it is made of: numbers, strings, lists, dicts"
