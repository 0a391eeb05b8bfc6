"""One call of every verb in each of its forms, for tests of what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

X = np.arange(6, dtype=np.float64)

Call = Callable[..., Any]
"""Called with a communicator, and perhaps a name, an array and further options."""

SINGLE: dict[str, Call] = {
    "all_reduce": lambda comm, name="k", x=X, **more: comm.all_reduce(x, name, **more),
    "monitored_all_reduce": lambda comm, name="k", x=X, **more: comm.monitored_all_reduce(x, name, **more),
    "reduce": lambda comm, name="k", x=X, **more: comm.reduce(x, 1, name, **more),
    "broadcast": lambda comm, name="k", x=X, **more: comm.broadcast(x, 1, name, **more),
    "gather": lambda comm, name="k", x=X, **more: comm.gather(x, 1, name, **more),
    "gather concat": lambda comm, name="k", x=X, **more: comm.gather(x, 1, name, concat=True, **more),
    "all_gather": lambda comm, name="k", x=X, **more: comm.all_gather(x, name, **more),
    "all_gather concat": lambda comm, name="k", x=X, **more: comm.all_gather(x, name, concat=True, **more),
    "scatter": lambda comm, name="k", x=X, **more: comm.scatter(x, 1, name, **more),
    "reduce_scatter": lambda comm, name="k", x=X, **more: comm.reduce_scatter(x, name, **more),
    "all_to_all": lambda comm, name="k", x=X, **more: comm.all_to_all(
        x[: comm.size] if isinstance(x, np.ndarray) else x, name, **more
    ),
    "all_to_all of lists": lambda comm, name="k", x=X, **more: comm.all_to_all([x] * comm.size, name, **more),
    "broadcast_object": lambda comm, name="k", x="x", **more: comm.broadcast_object(x, 1, name, **more),
    "all_gather_object": lambda comm, name="k", x="x", **more: comm.all_gather_object(x, name, **more),
    "gather_object": lambda comm, name="k", x="x", **more: comm.gather_object(x, 1, name, **more),
    "scatter_object": lambda comm, name="k", x="x", **more: comm.scatter_object([x] * comm.size, 1, name, **more),
    "consensus": lambda comm, name="k", x=X, **more: comm.consensus(x, name, **more),
    "barrier": lambda comm, name="k", **more: comm.barrier(name, **more),
}
"""Whatever options they have, they are calls of one name."""

COMPOSED: dict[str, Call] = {
    "all_reduce shared": lambda comm, name="k", x=X, **more: comm.all_reduce(x, name, shared=True, **more),
    "all_reduce weighted": lambda comm, name="k", x=X, **more: comm.all_reduce(x, name, op="avg", weight=1.0, **more),
    "all_reduce adasum": lambda comm, name="k", x=X, **more: comm.all_reduce(x, name, op="adasum", **more),
    "all_reduce of lists": lambda comm, name="k", x=X, **more: comm.all_reduce([x, X], name, **more),
    "all_reduce_many": lambda comm, name="k", x=X, **more: comm.all_reduce_many({"k": x, "l": X}, name, **more),
    "all_reduce_many by its arrays": lambda comm, name="k", x=X, **more: comm.all_reduce_many({name: x}, **more),
    "reduce_scatter of lists": lambda comm, name="k", x=X, **more: comm.reduce_scatter([x] * comm.size, name, **more),
}
"""Those that may be several collectives, or go another way."""

CALLS = SINGLE | COMPOSED
TAKE_ARRAYS = [title for title in CALLS if "object" not in title and title != "barrier"]


def verb_of(title: str) -> str:
    """The method that a call of the tables calls."""
    return title.split()[0]
