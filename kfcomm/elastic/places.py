"""Where training stands at a boundary between two steps, as joining ranks and checkpoints are told: of each sampler.

A sampler is known by its name or, without one, by its number in the order in which the program first goes through
them. Who joins, or goes on from a checkpoint, runs the program from its beginning: each sampler gets its own place when
the program comes to it, and what the others have gone through already is left out.
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
    """Where training stands; msgpack can carry it as a list.

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
        """What a rank, or a checkpoint, tells; also one of before samplers had names."""
        if len(told) == len(cls._fields):
            return cls(*told)
        steps, sampler = told
        return cls(steps, {} if sampler is None else {ANY: sampler})


class Samplers:
    """Those that this rank has gone through, each known by a name.

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
        """Where each stands."""
        return self.waiting | {name: one.state_dict() for name, one in self._found.items()}

    def restore(self, places: dict[Name, Any]) -> None:
        """Each stands where it stood then; those that have come later, where they began."""
        for name, one in self._found.items():
            one.load_state_dict(places.get(name, self._first[name]))
