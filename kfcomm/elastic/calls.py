"""What the ledger has to know of each verb: whose the result is, and whether fewer ranks can do it again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt, adapt_out, is_list
from kfcomm.arrays.dtypes import dtype_of
from kfcomm.collectives.batches import names_of
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.packing import many_key
from kfcomm.common.arguments import checked_name
from kfcomm.world.communicator import Communicator


class Kind(NamedTuple):
    """A verb.

    Attributes:
        is_own: each rank has a result of its own (or none), which no other could give it. Such a call is over when all
            ranks have theirs.
        is_rooted: a rank that is named gives, or gets, what it is about.
        can_shrink: those that live can do it again without the others.
    """

    is_own: bool = False
    is_rooted: bool = False
    can_shrink: bool = True


ALIKE, ALIKE_ROOTED = Kind(), Kind(is_rooted=True)
OWN_ROOTED, OWN = Kind(is_own=True, is_rooted=True), Kind(is_own=True, can_shrink=False)
KINDS: Mapping[str, Kind] = {
    "all_reduce": ALIKE,
    "monitored_all_reduce": ALIKE,
    "all_reduce_many": ALIKE,
    "all_gather": ALIKE,
    "barrier": ALIKE,
    "consensus": ALIKE,
    "all_gather_object": ALIKE,
    "broadcast": ALIKE_ROOTED,
    "broadcast_object": ALIKE_ROOTED,
    "reduce": OWN_ROOTED,
    "gather": OWN_ROOTED,
    "gather_object": OWN_ROOTED,
    "scatter": OWN,
    "reduce_scatter": OWN,
    "all_to_all": OWN,
    "scatter_object": OWN,
}
"""The verbs that outlive a rank."""
GIVEN_AS_ARRAYS = ("all_reduce", "monitored_all_reduce", "broadcast")
"""Their result has the shape and dtype of what every rank gives."""

_PARAMETERS = {verb: tuple(inspect.signature(getattr(Communicator, verb)).parameters.values())[1:] for verb in KINDS}
_PLACES = {verb: {one.name: place for place, one in enumerate(found)} for verb, found in _PARAMETERS.items()}
_DEFAULTS = {verb: {one.name: one.default for one in found} for verb, found in _PARAMETERS.items()}


class Call:
    """A verb with its arguments, as the caller has given them."""

    __slots__ = ("_args", "_kwargs", "kind", "verb")

    def __init__(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.verb = verb
        self.kind = KINDS[verb]
        self._args = args
        self._kwargs = kwargs

    def get(self, name: str) -> Any:
        """One of its arguments; None if the verb has no such, or it was left out and has no default."""
        if name in self._kwargs:
            return self._kwargs[name]
        place = _PLACES[self.verb].get(name, len(self._args))
        if place < len(self._args):
            return self._args[place]
        default = _DEFAULTS[self.verb].get(name)
        return None if default is inspect.Parameter.empty else default

    def title(self) -> str:
        """The text by which the ranks match it, as in a plain job; empty without a name.

        Raises:
            ConfigError: it cannot have such a name.
        """
        name = checked_name(self.get("name"))
        if self.verb != "all_reduce_many":
            return name or ""
        names = names_of(self.get("arrays")) if name is None else [name]
        return many_key(names) if names else ""

    def begin(self, comm: Communicator, root: Any, out: Any, timeout_s: float | None = None) -> Handle[Any]:
        """Call it, with this root and this ``out`` in the place of its own, and this timeout, if one is given.

        Raises:
            ConfigError: see the verb.
        """
        args, kwargs = self._args, self._kwargs
        places = _PLACES[self.verb]
        changed = {}
        if self.kind.is_rooted:
            changed["root"] = root
        if "out" in places:
            changed["out"] = out
        if timeout_s is not None:
            changed["timeout"] = timeout_s
        for name in list(changed):
            place = places[name]
            if place < len(args):
                args = (*args[:place], changed.pop(name), *args[place + 1 :])
        begun: Handle[Any] = getattr(comm, self.verb)(*args, **(kwargs | changed))
        return begun


def frozen(result: Any) -> list[np.ndarray[Any, Any]]:
    """NumPy arrays in a result that can be written to: now they cannot. What was changed, to be undone."""
    parts: Iterable[Any] = (result,)
    if isinstance(result, (list, tuple, dict)):
        parts = result.values() if isinstance(result, dict) else result
    found = [one for one in parts if type(one) is np.ndarray and one.flags.writeable]
    for one in found:
        one.setflags(write=False)
    return found


def plain(result: Any) -> Any:
    """A result as msgpack can carry it."""
    if isinstance(result, (list, tuple)):
        return ["list", [plain(one) for one in result]]
    if isinstance(result, dict):
        return ["dict", [[key, plain(one)] for key, one in result.items()]]
    view = adapt(result)
    return ["array", [list(view.shape), view.dtype.name, view.flat.tobytes()]]


def restored(fields: Any, like: Any) -> Any:
    """The inverse of `plain`, of the kind of ``like``: what the caller gave."""
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
    """A result put where the caller wants it; the caller's object, or objects.

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
