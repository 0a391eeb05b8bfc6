"""Position of training at a boundary between two steps, for joining ranks and checkpoints: one per sampler.

A sampler is identified by its name or, without one, by the order in which the program first uses its samplers. A rank
that joins or resumes from a checkpoint runs the program from its beginning: each sampler gets its position when the
program reaches it, and loops that the other ranks have finished are skipped.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeAlias

from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.errors import ConfigError

Name: TypeAlias = str | int
ANY = ""
"""In a place that tells no name: of whichever sampler comes first."""


class Place(NamedTuple):
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
    def of(cls, told: Any) -> Place:
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
