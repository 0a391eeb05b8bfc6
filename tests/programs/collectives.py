"""Collectives of arrays: what each rank gives, and what NumPy says that it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.programs.arrays import RANK_STRIDE, Array, Shape, filled, folded, shares, strided
from tests.programs.calls import Action

IN_PLACE = ("all_reduce", "monitored_all_reduce", "reduce", "broadcast", "all_to_all")
REDUCING = ("all_reduce", "monitored_all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
WIRED = ("all_reduce", "monitored_all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of one array of each rank, or a list of them.

    Attributes:
        verb: what `verb_of` each rank calls, but for `monitored`.
        form: ``""``, ``"concat"`` or ``"list"``.
        shapes: of the array of each rank; for ``list`` and ``scatter`` see ``rows``.
        rows: for ``list``: how many rows each rank has for each other one.
        outs: of each rank: ``""``, ``"new"``, ``"gaps"`` (not contiguous), or ``"x"``: the input itself.
        priorities: of each rank.
        monitored: the ranks that call ``monitored_all_reduce``.
        is_strided: whether the inputs have gaps.
        series: of calls that are alike but for what the arrays hold.
        starting: the ranks for which the series is one persistent collective; the others make plain calls.
        is_shared: all ranks get one result, which cannot be written to.
    """

    verb: str
    size: int
    name: str | None
    dtype: str
    shapes: tuple[Shape, ...]
    salt: int
    form: str = ""
    op: str = "sum"
    root: int = 0
    rows: tuple[tuple[int, ...], ...] = ()
    outs: tuple[str, ...] = ()
    priorities: tuple[int, ...] = ()
    wire: str | None = None
    monitored: tuple[int, ...] = ()
    is_strided: bool = False
    series: int | None = None
    starting: tuple[int, ...] = ()
    is_shared: bool = False

    @property
    def names(self) -> Sequence[str]:
        """See `Call`."""
        return [] if self.name is None else [self.name]

    def action(self, rank: int) -> Action:
        """See `Call`."""
        xs = [self._input(one) for one in range(self.size)]
        expected = ORACLES[self.verb](self, xs)[rank]
        options: dict[str, Any] = {"name": self.name, "priority": self.priorities[rank]}
        if self.verb in REDUCING:
            options["op"] = self.op
        if self.verb in ROOTED:
            options["root"] = self.root
        if self.verb in WIRED:
            options["wire_dtype"] = self.wire
        if self.form == "concat":
            options["concat"] = True
        if self.is_shared:
            options["shared"] = True
        x = xs[rank] if self.verb != "scatter" or rank == self.root else None
        if self.is_strided and isinstance(x, np.ndarray):
            x = strided(x)
        out = self._out(x, expected, self.outs[rank])
        if out is not None:
            options["out"] = out
        inputs = [] if x is None or out is x else x if isinstance(x, list) else [x]
        verb = "monitored_all_reduce" if rank in self.monitored else self.verb
        series = self.series if rank in self.starting else None
        return Action(verb, (x,), options, expected, inputs, out, series=series)

    def _input(self, rank: int) -> Any:
        """Input of a rank; for ``scatter`` the root's input is that of every rank here."""
        start = self.salt + RANK_STRIDE * rank
        if self.form == "list":
            row = self.shapes[0][1:]
            return [
                filled(self.dtype, (count, *row), start + 31 * to, size=self.size)
                for to, count in enumerate(self.rows[rank])
            ]
        return filled(self.dtype, self.shapes[rank], start, op=self.op, size=self.size, wire=self.wire)

    def _out(self, x: Any, expected: Any, which: str) -> Array | None:
        if which == "" or not isinstance(expected, np.ndarray):
            return None
        if which == "x" and isinstance(x, np.ndarray):
            return x
        out = np.full(expected.shape, 1, expected.dtype)
        return strided(out) if which == "gaps" else out


Oracle = Callable[[Collective, list[Any]], Sequence[Any]]


def _all_reduced(call: Collective, xs: list[Array]) -> Sequence[Any]:
    return [folded(call.op, xs)] * call.size


def _reduced(call: Collective, xs: list[Array]) -> Sequence[Any]:
    return _at_root(call, folded(call.op, xs))


def _reduce_scattered(call: Collective, xs: list[Array]) -> Sequence[Any]:
    total = folded(call.op, xs)
    return [total[part] for part in shares(len(total), call.size)]


def _broadcast(call: Collective, xs: list[Array]) -> Sequence[Any]:
    return [xs[call.root].copy()] * call.size


def _joined(call: Collective, xs: list[Array]) -> Array:
    return np.concatenate(xs) if call.form == "concat" else np.stack(xs)


def _gathered(call: Collective, xs: list[Array]) -> Sequence[Any]:
    return _at_root(call, _joined(call, xs))


def _all_gathered(call: Collective, xs: list[Array]) -> Sequence[Any]:
    return [_joined(call, xs)] * call.size


def _scattered(call: Collective, xs: list[Any]) -> Sequence[Any]:
    x = xs[call.root]
    return x if call.form == "list" else [x[part] for part in shares(len(x), call.size)]


def _exchanged(call: Collective, xs: list[Any]) -> Sequence[Any]:
    if call.form == "list":
        return [[x[rank] for x in xs] for rank in range(call.size)]
    return [np.concatenate([x[shares(len(x), call.size)[rank]] for x in xs]) for rank in range(call.size)]


def _at_root(call: Collective, result: Array) -> Sequence[Any]:
    return [result if rank == call.root else None for rank in range(call.size)]


ORACLES: dict[str, Oracle] = {
    "all_reduce": _all_reduced,
    "reduce": _reduced,
    "reduce_scatter": _reduce_scattered,
    "broadcast": _broadcast,
    "gather": _gathered,
    "all_gather": _all_gathered,
    "scatter": _scattered,
    "all_to_all": _exchanged,
}


@dataclass(frozen=True, slots=True)
class Many:
    """``all_reduce_many``; each rank gives the arrays in an order of its own.

    Attributes:
        arrays: name, dtype and shape of each.
    """

    size: int
    arrays: tuple[tuple[str, str, Shape], ...]
    salt: int
    op: str
    priorities: tuple[int, ...]
    wire: str | None = None

    @property
    def names(self) -> Sequence[str]:
        """See `Call`: they are other ones than those of single collectives."""
        return [f"many {name}" for name, _, _ in self.arrays]

    def action(self, rank: int) -> Action:
        """See `Call`."""
        turn = rank % len(self.arrays)
        given: dict[str, Array] = {}
        expected: dict[str, Array] = {}
        for number, (name, dtype, shape) in enumerate(self.arrays):
            xs = [
                filled(
                    dtype, shape, self.salt + 101 * number + RANK_STRIDE * one, op=self.op, size=self.size,
                    wire=self.wire,
                )
                for one in range(self.size)
            ]  # fmt: skip
            given[name], expected[name] = xs[rank], folded(self.op, xs)
        order = [*list(given)[turn:], *list(given)[:turn]]
        given = {name: given[name] for name in order}
        options = {"op": self.op, "priority": self.priorities[rank], "wire_dtype": self.wire}
        found = {name: expected[name] for name in order}
        return Action("all_reduce_many", (given,), options, found, list(given.values()))


@dataclass(frozen=True, slots=True)
class Agreement:
    """``barrier``, or ``consensus`` on arrays that are alike but for that of rank ``odd``."""

    verb: str
    size: int
    name: str | None
    priorities: tuple[int, ...]
    salt: int = 0
    odd: int | None = None

    @property
    def names(self) -> Sequence[str]:
        """See `Call`."""
        return [] if self.name is None else [self.name]

    def action(self, rank: int) -> Action:
        """See `Call`."""
        options = {"name": self.name, "priority": self.priorities[rank]}
        if self.verb == "barrier":
            return Action("barrier", (), options)
        x = filled("int32", (5,), self.salt + (rank == self.odd))
        return Action("consensus", (x,), options, self.odd is None or self.size == 1, [x])


@dataclass(frozen=True, slots=True)
class Swap:
    """``set_strategy``."""

    strategy: Any
    names: Sequence[str] = ()

    def action(self, rank: int) -> Action:
        """See `Call`."""
        return Action("set_strategy", (self.strategy,))
