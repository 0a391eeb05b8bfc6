"""Graphs of the world without one of its ranks, built before one is lost.

In the pause after a loss they were half of all the Python code that the surviving ranks ran.
"""

from __future__ import annotations

from collections.abc import Sequence

from kfcomm.strategies.plugins import build
from kfcomm.types import Layout
from kfcomm.world.communicator import Communicator

BUILT_AFTER_S = 0.25
"""Delay after the beginning of an epoch, whose first calls would wait; then for each further layout."""
MAX_SIZE, MAX_LAYOUTS = 32, 4
"""Beyond these, building them would take too long from the training: 25 ms for 31 ranks of a host."""


def foresee(comm: Communicator) -> None:
    """Build the graphs of all worlds with one rank fewer, a little later, if ``auto`` chooses them."""
    if 1 < comm.size <= MAX_SIZE and comm.strategy.name == "auto":
        ranks = range(comm.size)
        layouts = {comm.layout.part(rank for rank in ranks if rank != lost) for lost in ranks}
        if len(layouts) <= MAX_LAYOUTS:
            comm._session.engine.reactor.call_later(BUILT_AFTER_S, _build, comm, tuple(layouts))


def _build(comm: Communicator, layouts: Sequence[Layout]) -> None:
    """Build the first, which ``build`` caches, and the others one at a time."""
    if comm._session.is_closed:
        return
    build("auto", layouts[0])
    if len(layouts) > 1:
        comm._session.engine.reactor.call_later(BUILT_AFTER_S, _build, comm, layouts[1:])
