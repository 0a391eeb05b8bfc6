"""Latest algorithm of each model on a communicator: from it follows what another algorithm has to do when it begins.

A model is known by the name under which its algorithms meet, and by the names and shapes of its arrays.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

ModelKey: TypeAlias = tuple[str, frozenset[tuple[str, tuple[int, ...]]]]


@dataclass(eq=False, slots=True)
class Turn:
    """Record of one algorithm, without references to it: as the latest one it may be gone when another begins.

    Attributes:
        said: description of the algorithm.
        keeps_replicas: whether the ranks' models differ while it is the latest.
        former: turn that this one has replaced.
    """

    said: str
    keeps_replicas: bool
    former: Turn | None = None


Turns: TypeAlias = dict[ModelKey, Turn]

_turns: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
"""By communicator; it must not be a part of one, since algorithms are given communicators of four classes."""


def turns_of(comm: Any) -> Turns:
    """Return the latest turns on a communicator; the same object for all algorithms."""
    return _turns.setdefault(comm, {})


def key_of(name: str, arrays: Mapping[str, Any]) -> ModelKey:
    """Return the key of a model with these arrays by name, whose algorithms meet under ``name``."""
    # Without a name of their own algorithms of two models meet under the same one: their forms keep them apart.
    return name, frozenset((one, tuple(getattr(x, "shape", ()))) for one, x in arrays.items())
