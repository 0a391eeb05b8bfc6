"""One step of training, and the walk from one to the next as its driver sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from kfcomm.elastic.sampler import Indices
from kfcomm.errors import ConfigError, EpochChanged, PeerLost

T = TypeVar("T")


class Step:
    """One step of training.

    If the ``Elastic`` restarts steps, the body of the loop is below ``with step:``, which ends it silently when ranks
    are lost during the step.

    Attributes:
        number: counted from 0 while the ``Elastic`` is open, by those that join on, too; also of one that runs again.
        indices: of the samples that this rank trains on.
        batch: of those of all ranks.
        is_void: it has ended because ranks were lost, and is to be run again.
    """

    __slots__ = ("_restarts", "batch", "indices", "is_void", "number")

    def __init__(self, number: int, indices: Indices, batch: Indices, *, restarts: bool = False) -> None:
        self.number = number
        self.indices = indices
        self.batch = batch
        self.is_void = False
        self._restarts = restarts

    def __repr__(self) -> str:
        return f"<Step {self.number}: {len(self.indices)} of {len(self.batch)} samples>"

    def __enter__(self) -> Self:
        if not self._restarts:
            raise ConfigError('with step: is for Elastic(..., on_loss="restart_step")')
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_void = isinstance(error, (EpochChanged, PeerLost))
        return self.is_void


Wanted: TypeAlias = Step | np.ndarray[Any, np.dtype[Any]] | Callable[[], Awaitable[None]]
Walk: TypeAlias = Generator[Wanted, Any, T]
"""Yields a `Step`; an array, whose sums over all ranks under the name ``BOUNDARY`` are sent back; or a function to call
and await. Runs where the engine does."""


def following(walk: Walk[None], met: Any) -> Wanted | None:
    """The next item, given the requested sums; None at the end."""
    try:
        return walk.send(met)
    except StopIteration:
        return None
