"""The verbs as one table: what each rank gives to a call, and what NumPy says that each gets.

Values are whole numbers so small that every order of folding gives the same float32: the results do not depend on the
strategy, so that one expectation serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Inputs: TypeAlias = "list[Array]"
ROOT = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One way to call a verb.

    Attributes:
        verb: name of the method.
        expected: the results of all ranks, of the inputs of all ranks.
        options: arguments beside the data and the name.
        parameter: that which takes the data; None if the verb takes none.
        give: what a rank gives, of its input, its rank and the number of ranks.
        on_devices: whether its arrays may be on devices.
    """

    verb: str
    expected: Callable[[Inputs], list[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    parameter: str | None = "x"
    give: Callable[[Array, int, int], Any] = lambda x, rank, size: x
    on_devices: bool = True

    @property
    def name(self) -> str:
        """Title of the row; also the name of its calls."""
        return " ".join([self.verb, *(f"{key}={value}" for key, value in self.options.items() if key != "root")])


def inputs(size: int, length: int, use: int) -> Inputs:
    """The data of all ranks for one use of a name: ``size`` rows, so that every rank has its part."""
    return [((np.arange(size * length) * (rank + 2) + use) % 11 - 3.0).astype(np.float32) for rank in range(size)]


def _at_root(result: Any, size: int) -> list[Any]:
    return [result if rank == ROOT else None for rank in range(size)]


def _parts(x: Array, size: int) -> Inputs:
    return np.array_split(x, size)


def _unlike(xs: Inputs) -> Array:
    """Joined contributions, each shorter than the one before."""
    return np.concatenate([x[rank:] for rank, x in enumerate(xs)])


def _for_each_rank(x: Array, _: int, size: int) -> Inputs:
    return [to * x for to in range(size)]


def _all_to_all(xs: Inputs) -> list[Any]:
    return [np.concatenate([_parts(x, len(xs))[rank] for x in xs]) for rank in range(len(xs))]


def _folded(fold: Callable[..., Any]) -> Callable[[Inputs], list[Any]]:
    return lambda xs: [fold(xs)] * len(xs)


total, mean = partial(np.sum, axis=0), partial(np.mean, axis=0)

VERBS = (
    Row("all_reduce", _folded(total)),
    Row("all_reduce", _folded(partial(np.max, axis=0)), {"op": "max"}),
    Row("all_reduce", _folded(total), {"wire_dtype": "float16"}, on_devices=False),
    Row("all_reduce", _folded(mean), {"op": "avg", "weight": 2.0}, on_devices=False),
    Row("all_reduce", _folded(mean), {"op": "avg"}),
    Row("all_reduce", lambda xs: [[total(xs), total(xs)[:3]]] * len(xs), give=lambda x, *_: [x, x[:3]]),
    Row("monitored_all_reduce", _folded(total)),
    Row(
        "all_reduce_many",
        lambda xs: [{"a": total(xs), "b": 2 * total(xs)}] * len(xs),
        parameter="arrays",
        give=lambda x, *_: {"b": 2 * x, "a": x},
    ),
    Row("reduce", lambda xs: _at_root(total(xs), len(xs)), {"root": ROOT}),
    Row("reduce", lambda xs: _at_root(np.max(xs, axis=0), len(xs)), {"root": ROOT, "op": "max"}),
    Row("reduce", lambda xs: _at_root([total(xs)] * 2, len(xs)), {"root": ROOT}, give=lambda x, *_: [x, x]),
    Row("broadcast", lambda xs: [xs[ROOT]] * len(xs), {"root": ROOT}),
    Row("broadcast", lambda xs: [[xs[ROOT]] * 2] * len(xs), {"root": ROOT}, give=lambda x, *_: [x, x]),
    Row("gather", lambda xs: _at_root(np.stack(xs), len(xs)), {"root": ROOT}),
    Row(
        "gather",
        lambda xs: _at_root(_unlike(xs), len(xs)),
        {"root": ROOT, "concat": True},
        give=lambda x, rank, _: x[rank:],
    ),
    Row("all_gather", _folded(np.stack)),
    Row("all_gather", _folded(lambda xs: [np.stack(xs)] * 2), give=lambda x, *_: [x, x]),
    Row("all_gather", lambda xs: [_unlike(xs)] * len(xs), {"concat": True}, give=lambda x, rank, _: x[rank:]),
    Row("reduce_scatter", lambda xs: list(_parts(total(xs), len(xs)))),
    Row("reduce_scatter", lambda xs: list(_parts(total(xs)[:2], len(xs))), give=lambda x, *_: x[:2]),
    Row("reduce_scatter", lambda xs: [rank * total(xs) for rank in range(len(xs))], give=_for_each_rank),
    Row("scatter", lambda xs: list(_parts(xs[ROOT], len(xs))), {"root": ROOT}),
    Row("all_to_all", _all_to_all),
    Row("all_to_all", lambda xs: [[rank * x for x in xs] for rank in range(len(xs))], give=_for_each_rank),
    Row("barrier", lambda xs: [None] * len(xs), parameter=None),
    Row("consensus", lambda xs: [False] * len(xs), on_devices=False),
    Row("consensus", lambda xs: [True] * len(xs), {"timeout": 60}, give=lambda x, *_: "alike", on_devices=False),
    Row(
        "broadcast_object",
        lambda xs: [{"of": ROOT}] * len(xs),
        {"root": ROOT},
        parameter="value",
        give=lambda _, rank, size: {"of": rank},
        on_devices=False,
    ),
    Row(
        "all_gather_object",
        lambda xs: [list(range(len(xs)))] * len(xs),
        parameter="value",
        give=lambda _, rank, size: rank,
        on_devices=False,
    ),
    Row(
        "gather_object",
        lambda xs: _at_root(list(range(len(xs))), len(xs)),
        {"root": ROOT},
        parameter="value",
        give=lambda _, rank, size: rank,
        on_devices=False,
    ),
    Row(
        "scatter_object",
        lambda xs: [f"to {rank}" for rank in range(len(xs))],
        {"root": ROOT},
        parameter="values",
        give=lambda _, rank, size: [f"to {to}" for to in range(size)] if rank == ROOT else None,
        on_devices=False,
    ),
)
