"""Results of calls on their way between ranks and to callers: transfer to ranks that lack one, and read-only arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from kfcomm.arrays import adapt, adapt_out, is_list
from kfcomm.arrays.dtypes import dtype_of
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.elastic.call_log import CallLog, CallOutcome, Entry, Standing
from kfcomm.elastic.calls import ElasticCall
from kfcomm.elastic.state import Array

GIVEN_AS_ARRAYS = ("all_reduce", "monitored_all_reduce", "broadcast")
"""Verbs whose result has the shape and dtype of every rank's input."""
IMMUTABLE = (bool, int, float, str, bytes)


class ResultTransfer:
    """Transfer of results of one rank, or to it, in the communicator of the epoch."""

    def __init__(self, log: CallLog, ended: Callable[[], None]) -> None:
        # This rank's part in calls that are over here, each with the step of the call
        self.parts: dict[Handle[Any], int] = {}
        self._log = log
        self._ended = ended

    def begin(self, entry: Entry, outcome: CallOutcome, timeout_s: float | None) -> Handle[Any]:
        """Post the broadcast of a result, which all ranks do, with and without it."""
        comm, call = self._log.comm, entry.call
        root, name = comm.births.index(outcome.giver), name_for("given", entry)
        is_here = entry.standing is Standing.DONE
        # All ranks know shape and dtype, so the array travels as it is; other results need msgpack.
        if call.verb in GIVEN_AS_ARRAYS:
            return comm.broadcast(entry.result if is_here else call.get("x"), root, name, timeout=timeout_s)
        value = None if not is_here else entry.result if _is_object(call) else plain(entry.result)
        return comm.broadcast_object(value, root, name, timeout=timeout_s)

    def take_part(self, entry: Entry, outcome: CallOutcome) -> None:
        """Take part in sending the result of a call that is over on this rank, done or failed."""
        try:
            if entry.refusal is not None:
                raise entry.refusal[0]
            handle = self.begin(entry, outcome, None)
        except Exception as error:
            if entry.standing is Standing.DONE:
                raise
            self._log.comm.refuse(name_for("given", entry), error)  # its input was the reason of the failure
            return
        self.parts[handle] = entry.step
        handle.when_done(self._log.reactor, self._part_done)

    def cancel_before(self, step: int) -> None:
        """Cancel this rank's part in calls of past steps: a rank that has not come to them will not."""
        for handle, number in list(self.parts.items()):
            if number < step:
                handle.cancel()

    def _part_done(self, handle: Handle[Any]) -> None:
        self.parts.pop(handle, None)
        looked_at(handle)
        self._ended()


def received(call: ElasticCall, value: Any) -> Any:
    """Result of a call from what a `ResultTransfer` has brought."""
    if call.verb in GIVEN_AS_ARRAYS or _is_object(call):
        return value
    return restored(value, call.get("arrays" if call.verb == "all_reduce_many" else "x"))


def _is_object(call: ElasticCall) -> bool:
    return call.verb.endswith("_object") or call.verb == "consensus"


def name_for(what: str, entry: Entry) -> str:
    """Return a reserved name for a hidden part of a call."""
    # ranks are at most one step apart, and have calls of one key in both
    name, number = entry.key
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"kfcomm/{what}/{digest}/{number}/{entry.step % 2}"


def frozen(result: Any) -> list[Array]:
    """Make the NumPy arrays in a result read-only; returns those that were writeable, for the undo."""
    # The result may still have to be sent to a rank that lacks it: a write by the caller would make
    # ranks differ without an error.
    if type(result) is np.ndarray:  # mostly
        if not result.flags.writeable:
            return []
        result.setflags(write=False)
        return [result]
    found = [one for one in _parts(result) if type(one) is np.ndarray and one.flags.writeable]
    for one in found:
        one.setflags(write=False)
    return found


def is_bare(result: Any) -> bool:
    """Whether a caller can change a result that is `frozen`."""
    return not all(one is None or isinstance(one, (np.ndarray, np.generic, *IMMUTABLE)) for one in _parts(result))


def _parts(result: Any) -> Iterable[Any]:
    if isinstance(result, (list, tuple, dict)):
        return result.values() if isinstance(result, dict) else result
    return (result,)


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
    """Copy a result to the caller's ``out``; returns ``out``."""
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
