"""Calls of a step: verb and arguments, record on one rank, standing, and outcome after a loss."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.arrays import adapt, adapt_out, is_list
from kfcomm.arrays.dtypes import dtype_of
from kfcomm.collectives.batches import names_of
from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.collectives.packing import many_key
from kfcomm.common.arguments import checked_name
from kfcomm.core.collective import OWN_NAMES, name_of, shown
from kfcomm.elastic.stripes import Array
from kfcomm.transports.reactor import Timer
from kfcomm.world.communicator import Communicator

Key: TypeAlias = tuple[str, int]
"""Name of a call, and which use of the name in its step it is."""
Row: TypeAlias = "tuple[str, int, Standing | int, tuple[int, ...], int, str]"
"""Key, standing, contributors, step, and why it has failed."""


class Standing(IntEnum):
    """How a call stands on one rank; one that has not begun there stands nowhere."""

    POSTED = 0
    """It is not over."""
    HELD = 1
    """This rank has its own result, and does not know whether all others have theirs."""
    DONE = 2
    """It is over, with a result."""
    FAILED = 3
    """It is over, with an error of its own."""


class CallOutcome(NamedTuple):
    """What becomes of a call that is over on some rank.

    Attributes:
        step: of the call.
        giver: birth of the rank that gives the result to the others; -1 if it has failed for all.
        contributors: births of the ranks whose contributions are in the result.
        why: it has failed.
    """

    step: int
    giver: int
    contributors: tuple[int, ...] = ()
    why: str = ""


def decide(said: Sequence[tuple[int, Sequence[Row]]], births: Sequence[int]) -> Mapping[Key, CallOutcome]:
    """The verdict on each call that is over on some rank and not, in the same way, on all.

    A call that is done on one rank is done on all: the lowest of those gives it. One that has failed on one rank, and
    is done on none, has failed on all. Any other is done again. A rank may be a step further than others: then all has
    been over on all ranks before that step began.

    Args:
        said: by rank, in which step it is, and how its calls stand.
        births: of the ranks.
    """
    latest = max(step for step, _ in said)
    done: dict[Key, list[tuple[int, int, tuple[int, ...]]]] = {}
    failed: dict[tuple[Key, int], list[str]] = {}
    for birth, (_, rows) in zip(births, said, strict=True):
        for name, number, standing, contributors, step, why in rows:
            if step < latest:
                continue
            if standing == Standing.DONE:
                done.setdefault((name, number), []).append((step, birth, tuple(contributors)))
            elif standing == Standing.FAILED:
                failed.setdefault(((name, number), step), []).append(why)
    verdicts = {key: CallOutcome(*having[0]) for key, having in done.items() if len(having) < len(births)}
    for (key, step), reasons in failed.items():
        if key not in done and len(reasons) < len(births):
            verdicts[key] = CallOutcome(step, -1, (), reasons[0])
    return verdicts


class VerbTraits(NamedTuple):
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


ALIKE, ALIKE_ROOTED = VerbTraits(), VerbTraits(is_rooted=True)
OWN_ROOTED, OWN = VerbTraits(is_own=True, is_rooted=True), VerbTraits(is_own=True, can_shrink=False)
KINDS: Mapping[str, VerbTraits] = {
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


class ElasticCall:
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


BOUNDARY = f"{OWN_NAMES}boundary"
"""The name of the call between two steps."""

Births: TypeAlias = tuple[int, ...]


class ElasticHandle(Handle[Any]):
    """Handle of a call that survives the loss of ranks.

    Attributes:
        withdraw: ends the call on all ranks where it is not over; says whether it was not over on this one.
    """

    withdraw: Callable[[], bool] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        """End the call everywhere; False if it is complete already."""
        if self.done() or (self.withdraw is not None and not self.withdraw()):
            return False
        return super().cancel(msg)


class Entry:
    """A call of this rank.

    Attributes:
        key: see ``Call.title``, and which use of that in the step.
        call: the verb and its arguments.
        outer: what the caller holds; None while the caller does the call itself: see ``Dispatcher.enter``.
        inner: the collective under way; None if there is none, the caller's thread while that does it itself.
        standing: how it stands on this rank.
        step: to which it belongs; a boundary belongs to the one that it begins.
        result: once it is there.
        contributors: births of the ranks whose contributions are in it.
        scratch: where it was made, if the caller wants it elsewhere.
        unfreeze: arrays of the result that can be written to again when the step is over.
        is_void: it has failed because ranks were lost.
        why: it has failed, or its caller has given it up; for the other ranks.
        deadline_s: of the reactor's clock: all that is done for it is to end by then.
        timer: ends it by then, while nothing that has a timeout is under way.
        refusal: it is not made on this rank, for this error; a call of so many steps.
        has_told: those that wait in this epoch until all have their own result know that this rank has none.
    """

    __slots__ = (
        "call", "contributors", "deadline_s", "has_told", "inner", "is_void", "key", "outer", "refusal", "result",
        "scratch", "standing", "step", "timer", "unfreeze", "why",
    )  # fmt: skip

    def __init__(self, key: Key, call: ElasticCall, outer: Handle[Any] | None, step: int) -> None:
        self.key = key
        self.step = step
        self.call = call
        self.outer = outer
        self.inner: Handle[Any] | int | None = None
        self.standing = Standing.POSTED
        self.result: Any = None
        self.contributors: Births = ()
        self.scratch: Array | None = None
        self.unfreeze: list[Array] = []
        self.is_void = False
        self.why = ""
        self.deadline_s = math.inf
        self.timer: Timer | None = None
        self.refusal: tuple[BaseException, int] | None = None
        self.has_told = False

    @property
    def name(self) -> str:
        """As the caller knows it; "unnamed" without one."""
        return name_of(self.key[0])

    @property
    def title(self) -> str:
        """The same for messages."""
        return shown(self.key[0].partition("\0")[0])

    @property
    def is_own(self) -> bool:
        """Whether it is not the program's, but made by kfcomm between steps."""
        return self.key[0].startswith(OWN_NAMES)

    @property
    def is_left(self) -> bool:
        """Whether the caller has given it up, or its time is over, while it is not over among the ranks."""
        return self.outer is not None and self.outer.done()

    def is_counted(self, names: Collection[str] | None) -> bool:
        """Whether it tells of the step's samples: of these names or, without any, the program's and not kfcomm's."""
        return self.name in names if names is not None else not self.is_own

    @property
    def is_sent(self) -> bool:
        """Whether it has to be given to those who have none: each holds its own, and a barrier has no result."""
        return not self.call.kind.is_own and self.call.verb != "barrier"

    def refuse(self, error: BaseException) -> None:
        """It fails."""
        self.standing = Standing.FAILED
        self.why = self.why or str(error) or type(error).__name__
        if self.outer is not None and not self.outer.done():
            self.outer.set_exception(error)

    def heard(self) -> None:
        """Nobody has to look at the result, or at the error."""
        if self.outer is not None:
            looked_at(self.outer)


def name_for(what: str, key: Key) -> str:
    """A name that no caller uses, whatever the caller's is."""
    digest = hashlib.blake2b(key[0].encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"kfcomm/{what}/{digest}/{key[1]}"
