"""Samples of each step: their order, and positions for joining ranks and checkpoints.

There is one order for each pass, and one batch of all ranks for each step. A sampler does not know which ranks are
alive: the shares that were not used are given back to it, and it gives those samples again before the pass ends. All
ranks hold equal samplers, and make the same calls of them.

A sampler is identified by its name or, without one, by the order in which the program first uses its samplers. A rank
that joins or resumes from a checkpoint runs the program from its beginning: each sampler gets its position when the
program reaches it, and loops that the other ranks have finished are skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kfcomm.elastic.positions import shown_place
from kfcomm.errors import ConfigError

Name: TypeAlias = str | int
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class ElasticSampler:
    """Samples of one pass after another, in steps of one global batch.

    Each sample is used once in each pass, however the number of ranks changes. Samples of a rank that died before they
    were used are given again later in the same pass. The last batch of a pass may be smaller.

    Args:
        length: number of samples.
        batch: number of samples of one step, of all ranks together.
        seed: seed of the order of each pass, below ``2**64``; None for the natural order.
        name: name in checkpoints and for joining ranks; without one, its number in the order in which a program first
            uses its samplers. Needed where that order is not always the same.

    Raises:
        ConfigError: an argument is not valid.

    Attributes:
        passes: number of complete passes.
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
        self._aside: set[int] = set()
        self._order = self._order_of(0)

    def __repr__(self) -> str:
        return shown_place(self.state_dict())

    @property
    def batch(self) -> int:
        """Number of samples of the next step, of all ranks together. May be set in any step, on all ranks alike.

        Raises:
            ConfigError: on setting: it is not a whole number from 1 on.
        """
        return self._batch

    @batch.setter
    def batch(self, batch: int) -> None:
        self._batch = _count("batch", batch, 1)

    @property
    def left(self) -> int:
        """Number of samples of this pass that are still to be given."""
        return len(self._kept(self._order[self._position :])) + len(self._again)

    @property
    def aside(self) -> list[int]:
        """Samples that were set aside, in ascending order."""
        return sorted(self._aside)

    def set_aside(self, indices: Sequence[int] | Indices) -> None:
        """Never give these samples again, in this pass and all later ones; all ranks call it alike.

        Samples of the present step are used in it, unless it is void. ``aside`` lists them, also on ranks that join and
        after a checkpoint. With some set aside a step costs a search of its samples among them.

        Raises:
            ConfigError: an index is not that of a sample.
        """
        found = {_count("an index", index, 0) for index in indices}
        if max(found, default=0) >= self.length:
            raise ConfigError(f"an index of this sampler is below {self.length}, not {max(found)}")
        self._aside |= found
        self._again = [index for index in self._again if index not in found]

    def _kept(self, indices: Indices) -> Indices:
        """Samples that are not set aside."""
        return indices[~np.isin(indices, list(self._aside))] if self._aside else indices

    def take(self) -> Indices:
        """Take the indices of the next global batch; empty at the end of the pass."""
        taken = self._order[:0]
        while len(taken) < self.batch and self._position < self.length:
            end = min(self._position + self.batch - len(taken), self.length)
            found = self._kept(self._order[self._position : end])
            taken = np.concatenate([taken, found]) if len(taken) else found
            self._position = end
        missing = self.batch - len(taken)
        if missing and self._again:
            again, self._again = self._again[:missing], self._again[missing:]
            taken = np.concatenate([taken, np.array(again, np.int64)])
        return taken

    def take_until(self, passes: int) -> Indices:
        """Take the next global batch, also of the next pass; empty once this number of passes is complete."""
        taken = self._order[:0]
        while not len(taken) and self.passes < passes:
            taken = self.take()
            if not len(taken):
                self.end_pass()
        return taken

    def give_back(self, indices: Sequence[int] | Indices) -> None:
        """Give unused samples again before the pass ends."""
        self._again.extend(index for index in map(int, indices) if index not in self._aside)

    def end_pass(self) -> None:
        """Begin the next pass: all samples have been used."""
        self.passes += 1
        self._position = 0
        self._order = self._order_of(self.passes)

    def state_dict(self) -> dict[str, Any]:
        """Position, for checkpoints and joining ranks; msgpack can carry it."""
        return {
            "length": self.length, "batch": self._first_batch, "seed": self.seed, "passes": self.passes,
            "position": self._position, "again": list(self._again), "next_batch": self.batch, "aside": self.aside,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of another sampler, with its batch.

        Raises:
            ConfigError: that sampler was made with another length, batch or seed.
        """
        for name, mine in (("length", self.length), ("batch", self._first_batch), ("seed", self.seed)):
            if state[name] != mine:
                raise ConfigError(f"{name} of this sampler is {mine}, that of the state {state[name]}")
        self.batch = state.get("next_batch", self._first_batch)  # without one: a checkpoint from before it was kept
        made, self.passes = self.passes, int(state["passes"])
        self._position = int(state["position"])
        self._again = [int(index) for index in state["again"]]
        self._aside = {int(index) for index in state.get("aside", ())}
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
    """Return the part of a global batch for one of ``size`` ranks; the first ones may be longer by one."""
    each, more = divmod(len(indices), size)
    start = rank * each + min(rank, more)
    return indices[start : start + each + (rank < more)]


ANY = ""
"""Name in a position without names: the sampler that the program uses first."""


class Position(NamedTuple):
    """Position of training; msgpack can carry it as a list."""

    steps: int = 0  # before it
    samplers: dict[Name, Any] = {}  # noqa: RUF012  position of each, by name; never written to
    # The loop under way: the sampler's name, and the arguments ``passes`` and ``used_in``. None before the first step,
    # or if it is not known.
    walk: list[Any] | None = None
    lineage: list[str] = []  # noqa: RUF012  ids of jobs, see `checkpoint`

    @classmethod
    def of(cls, told: Any) -> Position:
        """Parse the report of a rank or a checkpoint, also of a version without names of samplers."""
        if len(told) == len(cls._fields):
            return cls(*told)
        steps, sampler = told
        return cls(steps, {} if sampler is None else {ANY: sampler})


class Samplers:
    """Samplers that this rank has used, by name."""

    def __init__(self) -> None:
        self.waiting: dict[Name, Any] = {}  # positions of the samplers that this rank has not used yet, by name
        self._found: dict[Name, ElasticSampler] = {}
        self._first: dict[Name, Any] = {}
        self._names: weakref.WeakKeyDictionary[ElasticSampler, Name] = weakref.WeakKeyDictionary()
        self._num_unnamed = 0

    def name_of(self, sampler: ElasticSampler) -> Name:
        """Return the name of a sampler; at its first use, set it to its position."""
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
        # Checkpoints from before samplers had names hold one position, without a name.
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

    def restore(self, places: dict[Name, Any], *, keeps_aside: bool = False) -> None:
        """Return to former positions; samplers that were first used later return to their beginning.

        With ``keeps_aside`` the samples stay set aside that are so now.
        """
        for name, one in self._found.items():
            aside = one.aside if keeps_aside else ()
            one.load_state_dict(places.get(name, self._first[name]))
            one.set_aside(aside)
