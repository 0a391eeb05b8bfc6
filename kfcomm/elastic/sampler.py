"""Samples of each step, and positions of samplers for joining ranks and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.errors import ConfigError

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class ElasticSampler:
    """The samples of one pass after another, in steps of one global batch.

    Each sample is used once in each pass, whatever the number of ranks is and however it changes. What a rank that died
    had, and nobody used, comes again later in the same pass. The last batch of a pass may be smaller.

    Args:
        length: number of samples.
        batch: samples of one step, of all ranks together.
        seed: of the order; each pass has another, below ``2**64``. None for the natural order.
        name: by which checkpoints and joining ranks know it; without one, its number in the order in which a program
            first goes through its samplers. It is needed where that order is not always the same.

    Raises:
        ConfigError: one of them cannot be.

    Attributes:
        passes: how many are complete.
    """

    def __init__(self, length: int, batch: int, seed: int | None = 0, *, name: str | None = None) -> None:
        self.name = None if name is None else _text(name)
        self.length = _count("length", length, 1)
        self.batch = batch
        self._first_batch = self.batch
        self.seed = None if seed is None else _count("seed", seed, 0)
        if self.seed is not None and self.seed >> 64:
            raise ConfigError(f"the seed of a sampler is below 2**64, not {seed!r}")
        self.passes = 0
        self._position = 0
        self._again: list[int] = []
        self._order = self._order_of(0)

    def __repr__(self) -> str:
        again = f", {len(self._again)} to be given again" if self._again else ""
        return f"<ElasticSampler: pass {self.passes}, {self._position} of {self.length} given{again}>"

    @property
    def batch(self) -> int:
        """Samples of the next step, of all ranks together. May be set in any step, on all ranks alike.

        Raises:
            ConfigError: on setting: it is no whole number from 1 on.
        """
        return self._batch

    @batch.setter
    def batch(self, batch: int) -> None:
        self._batch = _count("batch", batch, 1)

    @property
    def left(self) -> int:
        """How many samples of this pass are still to be given."""
        return self.length - self._position + len(self._again)

    def take(self) -> Indices:
        """The indices of the next global batch; empty once all of the pass have been given."""
        end = min(self._position + self.batch, self.length)
        taken = self._order[self._position : end]
        self._position = end
        missing = self.batch - len(taken)
        if missing and self._again:
            again, self._again = self._again[:missing], self._again[missing:]
            taken = np.concatenate([taken, np.array(again, np.int64)])
        return taken

    def take_until(self, passes: int) -> Indices:
        """The same, on into the next pass; empty once so many are behind."""
        taken = self._order[:0]
        while not len(taken) and self.passes < passes:
            taken = self.take()
            if not len(taken):
                self.end_pass()
        return taken

    def give_back(self, indices: Sequence[int] | Indices) -> None:
        """Nobody used these: they come again before the pass ends."""
        self._again.extend(int(index) for index in indices)

    def end_pass(self) -> None:
        """All have been used: the next pass begins."""
        self.passes += 1
        self._position = 0
        self._order = self._order_of(self.passes)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as msgpack can carry it: for checkpoints, and ranks that join."""
        return {
            "length": self.length, "batch": self._first_batch, "seed": self.seed, "passes": self.passes,
            "position": self._position, "again": list(self._again), "next_batch": self.batch,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood, with the batch that was set there.

        Raises:
            ConfigError: that was a sampler made with other samples, batches or seed.
        """
        for name, mine in (("length", self.length), ("batch", self._first_batch), ("seed", self.seed)):
            if state[name] != mine:
                raise ConfigError(f"{name} of this sampler is {mine}, that of the state {state[name]}")
        self.batch = state.get("next_batch", self._first_batch)  # without one: a checkpoint from before it was kept
        made, self.passes = self.passes, int(state["passes"])
        self._position = int(state["position"])
        self._again = [int(index) for index in state["again"]]
        if made != self.passes:  # 40 ms for a million samples, in which no other thread of this process runs
            self._order = self._order_of(self.passes)

    def _order_of(self, number: int) -> Indices:
        if self.seed is None:
            return np.arange(self.length)
        # frozen by NumPy's policy (NEP 19): the same in every version, which ranks and checkpoints rely on
        random = np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, number])
        return random.permutation(self.length).astype(np.int64)


def _text(name: Any) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"the name of a sampler is text that can be printed, not {name!r}")
    return str.__str__(name)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} of a sampler is a whole number from {least} on, not {value!r}")
    return int(value)


def share(indices: Indices, rank: int, size: int) -> Indices:
    """The part of a global batch that one of ``size`` ranks trains on: as even as can be, the first ones one longer."""
    each, more = divmod(len(indices), size)
    start = rank * each + min(rank, more)
    return indices[start : start + each + (rank < more)]


Name: TypeAlias = str | int
ANY = ""
"""In a place that tells no name: of whichever sampler comes first."""


class Position(NamedTuple):
    """Position of training; msgpack can carry it as a list.

    Attributes:
        steps: so many have been before.
        samplers: where each stands, by name.
        walk: what the ranks are going through: the sampler's name, and the arguments ``passes`` and ``used_in``. None
            before the first step, or if it is not told.
        lineage: see `checkpoint`.
    """

    steps: int = 0
    samplers: dict[Name, Any] = {}  # noqa: RUF012  never written to
    walk: list[Any] | None = None
    lineage: list[str] = []  # noqa: RUF012

    @classmethod
    def of(cls, told: Any) -> Position:
        """Parse the report of a rank or a checkpoint, also of a version without names of samplers."""
        if len(told) == len(cls._fields):
            return cls(*told)
        steps, sampler = told
        return cls(steps, {} if sampler is None else {ANY: sampler})


class Samplers:
    """Samplers that this rank has used, by name.

    Attributes:
        waiting: where those stand that this rank has not come to, by name.
    """

    def __init__(self) -> None:
        self.waiting: dict[Name, Any] = {}
        self._found: dict[Name, ElasticSampler] = {}
        self._first: dict[Name, Any] = {}
        self._names: weakref.WeakKeyDictionary[ElasticSampler, Name] = weakref.WeakKeyDictionary()
        self._num_unnamed = 0

    def name_of(self, sampler: ElasticSampler) -> Name:
        """Its name; when it comes for the first time, it is taken to its place.

        Raises:
            ConfigError: it is not a sampler like the one that stands there; or another has its name.
        """
        if not isinstance(sampler, ElasticSampler):
            raise ConfigError(f"steps go through a kfcomm.elastic.ElasticSampler, not through {sampler!r:.80}")
        name = self._names.get(sampler)
        if name is None:
            return self._first_time(sampler)
        if self._found[name] is not sampler:
            raise ConfigError(f"two samplers have the name {name!r}: give each one of its own")
        return name

    def _first_time(self, sampler: ElasticSampler) -> Name:
        name: Name = self._num_unnamed if sampler.name is None else sampler.name
        place = self.waiting.pop(name, None) or self.waiting.pop(ANY, None)
        if place is not None:
            try:
                sampler.load_state_dict(place)
            except ConfigError as error:
                raise ConfigError(f"sampler {name!r} does not fit the place of the job: {error}") from None
        self._num_unnamed += sampler.name is None
        self._names[sampler] = name
        self._found[name] = sampler
        self._first[name] = sampler.state_dict()
        return name

    def places(self) -> dict[Name, Any]:
        """Position of each sampler."""
        return self.waiting | {name: one.state_dict() for name, one in self._found.items()}

    def restore(self, places: dict[Name, Any]) -> None:
        """Each stands where it stood then; those that have come later, where they began."""
        for name, one in self._found.items():
            one.load_state_dict(places.get(name, self._first[name]))
