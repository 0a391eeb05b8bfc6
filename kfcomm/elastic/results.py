"""Results of calls: read-only, in the caller's buffer, and encoded for ranks that lack them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kfcomm.arrays import adapt, adapt_out, is_list
from kfcomm.arrays.dtypes import dtype_of
from kfcomm.elastic.call_log import Key


def frozen(result: Any) -> list[np.ndarray[Any, Any]]:
    """Make the NumPy arrays in a result read-only; returns those that were writeable, for the undo."""
    parts: Iterable[Any] = (result,)
    if isinstance(result, (list, tuple, dict)):
        parts = result.values() if isinstance(result, dict) else result
    # The result may still have to be sent to a rank that lacks it: a write by the caller would make
    # ranks differ without an error.
    found = [one for one in parts if type(one) is np.ndarray and one.flags.writeable]
    for one in found:
        one.setflags(write=False)
    return found


def plain(result: Any) -> Any:
    """Encode a result for msgpack."""
    if isinstance(result, (list, tuple)):
        return ["list", [plain(one) for one in result]]
    if isinstance(result, dict):
        return ["dict", [[key, plain(one)] for key, one in result.items()]]
    view = adapt(result)
    return ["array", [list(view.shape), view.dtype.name, view.flat.tobytes()]]


def restored(fields: Any, like: Any) -> Any:
    """Decode a result of `plain`, as the kind of array that the caller gave (``like``)."""
    what, value = fields
    if what == "list":
        return [restored(one, like) for one in value]
    if what == "dict":
        return {key: restored(one, like[key]) for key, one in value}
    shape, dtype, data = value
    first = like[0] if isinstance(like, (list, tuple)) and like else like
    flat = np.frombuffer(bytearray(data), dtype_of(dtype))
    return flat.reshape(shape) if first is None else adapt(first).restore(flat, tuple(shape))


def written(result: Any, out: Any) -> Any:
    """Copy a result to the caller's ``out``; returns ``out``.

    Raises:
        ConfigError: it does not fit.
    """
    if isinstance(out, Mapping):
        for key, one in result.items():
            written(one, out[key])
    elif is_list(out):
        for one, place in zip(result, out, strict=True):
            written(one, place)
    else:
        view = adapt(result)
        to = adapt_out(out, view.shape, view.dtype)
        to.flat[:] = view.flat
        to.finish()
    return out


def name_for(what: str, key: Key) -> str:
    """Return a reserved name for a hidden part of a call."""
    digest = hashlib.blake2b(key[0].encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"kfcomm/{what}/{digest}/{key[1]}"
