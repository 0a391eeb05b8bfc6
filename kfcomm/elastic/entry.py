"""A call of a step, as one rank knows it: the verb with its arguments, how it stands, its result once it is there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.core.collective import OWN_NAMES, name_of, shown
from kfcomm.elastic.calls import Call
from kfcomm.elastic.stripes import Array
from kfcomm.elastic.verdicts import Key, Standing
from kfcomm.transports.reactor import Timer

BOUNDARY = f"{OWN_NAMES}boundary"
"""The name of the call between two steps."""

Births: TypeAlias = tuple[int, ...]


class Outer(Handle[Any]):
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
        outer: what the caller holds; None while the caller does the call itself: see ``Ledger.enter``.
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

    def __init__(self, key: Key, call: Call, outer: Handle[Any] | None, step: int) -> None:
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
