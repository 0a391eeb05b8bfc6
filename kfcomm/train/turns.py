"""Latest algorithm of each model on a communicator: from it follows what another algorithm has to do when it begins.

A model is known by the name under which its algorithms meet, and by a digest of the names and shapes of its arrays:
without a name of their own algorithms of two models meet under the same one, and the digests keep them apart.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

ModelKey: TypeAlias = tuple[str, str]
"""Name and digest."""


@dataclass(eq=False, slots=True)
class AlgorithmTurn:
    """Record of one algorithm, without references to it: as the latest one it may be gone when another begins.

    Attributes:
        said: description of the algorithm.
        keeps_replicas: whether the ranks' models differ while it is the latest.
        former: turn that this one has replaced.
    """

    said: str
    keeps_replicas: bool
    former: AlgorithmTurn | None = None


@dataclass(eq=False, slots=True)
class Model:
    """Model on a communicator, with the turn of its latest algorithm."""

    key: ModelKey
    latest: AlgorithmTurn | None = None

    def take(self, turn: AlgorithmTurn) -> AlgorithmTurn | None:
        """Make this turn the latest; returns the former one."""
        former = self.latest
        if former is not None and former.former is not None:
            former.former.former = None  # else each turn would keep all before it
        turn.former, self.latest = former, turn
        return former


_models: weakref.WeakKeyDictionary[Any, dict[ModelKey, Model]] = weakref.WeakKeyDictionary()
"""By communicator; not an attribute of it, since algorithms are given communicators of four classes."""


def model_of(comm: Any, key: ModelKey) -> Model:
    """Return the model of a key on a communicator; the same object for all algorithms."""
    return _models.setdefault(comm, {}).setdefault(key, Model(key))


def digest_of(arrays: Mapping[str, Any]) -> str:
    """Return a digest of the names and shapes of these arrays; the same on all ranks."""
    form = sorted((one, tuple(map(int, getattr(x, "shape", ())))) for one, x in arrays.items())
    return hashlib.blake2b(repr(form).encode(), digest_size=8).hexdigest()
