"""A call of a step, as one rank knows it: the verb with its arguments, how it stands, its result once it is there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.calls import Call
from kfcomm.elastic.stripes import Array
from kfcomm.elastic.verdicts import Key, Standing

BOUNDARY = f"{OWN_NAMES}boundary"
"""The name of the call between two steps."""

Births: TypeAlias = tuple[int, ...]


class Entry:
    """A call of this rank.

    Attributes:
        key: its name (empty without one), and which use of that in the step.
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
    """

    __slots__ = (
        "call", "contributors", "inner", "is_void", "key", "outer", "result", "scratch", "standing", "step", "unfreeze",
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

    def is_counted(self, names: Sequence[str] | None) -> bool:
        """Whether it tells of the step's samples: of these names or, without any, the program's and not kfcomm's."""
        return self.key[0] in names if names is not None else not self.key[0].startswith(OWN_NAMES)

    @property
    def is_sent(self) -> bool:
        """Whether it has to be given to those who have none: each holds its own, and a barrier has no result."""
        return not self.call.kind.is_own and self.call.verb != "barrier"

    def refuse(self, error: BaseException) -> None:
        """It fails."""
        self.standing = Standing.FAILED
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
