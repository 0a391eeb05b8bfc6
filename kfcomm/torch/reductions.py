"""All_reduces in place that each backward pass makes anew, over the ranks of a fixed world or of an elastic one.

In a fixed world they are persistent. Persistent collectives do not survive the loss of a rank, so an elastic world gets
calls that do: each has a result in memory of its own, which is copied to its place, as a repeat needs the input intact.
Collectives of device memory are calls by name, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kfcomm.core.collective import OWN_NAMES


class RestartableReduction(Protocol):
    """A collective that can be started again once it is over."""

    def start(self) -> object:
        """Send this rank's contribution, which has to stay as it is until the end."""

    def done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> object:
        """Wait for the end; raise the error of one that has failed."""

    def cancel(self) -> object:
        """End it on every rank."""


def is_elastic(comm: Any) -> bool:
    """Whether a blocking communicator is of ``init(elastic=True)``."""
    return hasattr(comm, "elastic_over")


def world_ranks(comm: Any) -> tuple[int, ...]:
    """The ranks of a communicator by their numbers in the world, or in the elastic step."""
    return tuple(range(comm.size)) if is_elastic(comm) else comm._inner._group.view.members


def aside(comm: Any, name: str) -> str:
    """The name of a collective beside those that carry gradients or models; only these tell which samples are used."""
    return f"{OWN_NAMES}{name}" if is_elastic(comm) else name


def reduction(comm: Any, x: Any, name: str, options: dict[str, Any]) -> RestartableReduction:
    """An all_reduce of ``x`` into ``options["out"]``, which may be the same memory; lists only with ``adasum``."""
    if is_elastic(comm) or options["op"] == "adasum" or not isinstance(x, np.ndarray):
        return RepeatedAllReduce(comm, x, name, options)
    found: RestartableReduction = comm.all_reduce_init(x, name, **options)
    return found


def contributors(comm: Any, reduction: RestartableReduction) -> list[int]:
    """Ranks whose contributions a result has: all, unless one was lost meanwhile in an elastic world."""
    uids = reduction.contributors if isinstance(reduction, RepeatedAllReduce) else None
    return [rank for rank, uid in enumerate(comm.births) if uids is None or uid in uids]


class RepeatedAllReduce:
    """The same all_reduce once a pass."""

    def __init__(self, comm: Any, x: Any, name: str, options: dict[str, Any]) -> None:
        self._comm, self._x, self._name, self._options = comm, x, name, options
        self._handle: Any = None

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """Uids of the ranks whose contributions the latest result has; None for all."""
        found: tuple[int, ...] | None = None if self._handle is None else self._handle.contributors
        return found

    def start(self) -> None:
        """Make the call."""
        self._handle = self._comm.all_reduce_async(self._x, self._name, **self._options)

    def done(self) -> bool:
        """Whether the latest call is over."""
        if self._handle is None or not self._handle.done():
            return self._handle is None
        if not self._handle.cancelled():
            self._handle.exception()  # an error that nobody waits for any more is not to be logged
        return True

    def wait(self) -> None:
        """Wait for the latest call."""
        if self._handle is not None:
            self._handle.wait()

    def cancel(self) -> None:
        """End the latest call on every rank."""
        if self._handle is not None:
            self._handle.cancel()
