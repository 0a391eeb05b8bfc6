"""Places of workers: bundles of placement groups.

The initial workers have one group, so that all of them are placed or none. Each additional worker has a group of one
bundle, since a placement group does not grow. A bundle of a lost node is placed anew by Ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kfcomm.errors import ConfigError

logger = logging.getLogger("kfcomm")

STALL_AFTER_S = 10.0
"""Wait for a place that is reported."""
_LOOK_S = 0.5
_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_NOT_SHOWN = ("bundle_group_", "object_store_memory")


class Place(NamedTuple):
    """A bundle."""

    group: Any
    bundle: int


class Places:
    """Places of one job; ``resources`` are those of each worker."""

    def __init__(self, resources: Mapping[str, float], count: int) -> None:
        self.resources = _checked(resources)
        self._first = placement_group([self.resources] * count, strategy="PACK")
        self._more: dict[Any, Any] = {}  # further groups, by id
        self._free = [Place(self._first, index) for index in range(count)]

    def wait(self, within_s: float) -> None:
        """Wait until the initial workers have their places.

        Raises:
            ConfigError: they have not within that time; says what was asked, and what there is.
        """
        begun_s, is_reported = time.monotonic(), False
        # In slices: Python handles Ctrl-C between them.
        while not self._first.wait(_LOOK_S):
            waited_s = time.monotonic() - begun_s
            if waited_s >= within_s:
                raise ConfigError(f"within {within_s:g} s Ray found no places for {self._asked()}")
            if waited_s >= STALL_AFTER_S and not is_reported:
                is_reported = True
                logger.warning("Ray has no places yet for %s", self._asked())

    def take(self) -> Place:
        """A place for a worker: a free one, or one that is asked of Ray now."""
        if self._free:
            return self._free.pop(0)
        group = placement_group([self.resources])
        self._more[group.id] = group
        return Place(group, 0)

    def give_back(self, place: Place) -> None:
        """Keep a place of the first group for another worker; return another one to Ray."""
        group = self._more.pop(place.group.id, None)
        if group is None:
            self._free.append(place)
        else:
            remove_placement_group(group)

    def options(self, place: Place) -> dict[str, Any]:
        """Options of an actor at a place."""
        others = {name: count for name, count in self.resources.items() if name not in _ARGUMENTS}
        given = {_ARGUMENTS[name]: count for name, count in self.resources.items() if name in _ARGUMENTS}
        where = PlacementGroupSchedulingStrategy(place.group, place.bundle)
        return {"num_cpus": 0, **given, "resources": others, "scheduling_strategy": where}

    def close(self) -> None:
        """Return all places to Ray."""
        for group in (self._first, *self._more.values()):
            remove_placement_group(group)

    def _asked(self) -> str:
        asked = f"{self._first.bundle_count} workers with {_listed(self.resources)} each"
        return f"{asked}: the cluster has {_listed(ray.cluster_resources())}, and {_free()}"


def stalled(uid: int, resources: Mapping[str, float]) -> None:
    """Report that a worker which was started later has no place yet."""
    logger.warning("rank %d waits for a place with %s; of the cluster %s", uid, _listed(resources), _free())


def _free() -> str:
    return f"{_listed(ray.available_resources())} is free"


def _listed(resources: Mapping[str, float]) -> str:
    """Resources in words, without those that Ray adds for each node."""
    shown = (name for name in sorted(resources) if ":" not in name and not name.startswith(_NOT_SHOWN))
    return ", ".join(f"{name} {resources[name]:g}" for name in shown) or "nothing"


def _checked(resources: Mapping[str, float]) -> dict[str, float]:
    found = dict(resources)
    for name, count in found.items():
        number: Any = count
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0:
            raise ConfigError(f"resources_per_worker: {name!r}: {count!r} must be a name and a number, as CPU: 2")
    found = {name: count for name, count in found.items() if count}
    if not found:
        raise ConfigError("resources_per_worker is empty: name at least one resource, such as CPU: 1")
    return found
