"""The communicators of ranks that live in virtual time."""

from __future__ import annotations

from typing import Any

from kfcomm.testing.virtual.hub import VirtualHub
from kfcomm.testing.virtual.network import NetworkModel, VirtualLinks
from kfcomm.testing.virtual.store import VirtualStore
from kfcomm.testing.worlds import MemoryWorld
from kfcomm.transports.reactor import Reactor
from kfcomm.types import override

NUM_CPUS = 8
"""Of each host, on whatever machine this runs: strategies depend on it."""


class VirtualWorld(MemoryWorld):
    """A `MemoryWorld` over a `NetworkModel`."""

    store: VirtualStore

    def __init__(self, model: NetworkModel, size: int, *, reactor: Reactor, **options: Any) -> None:
        self._model = model
        self._links: list[VirtualLinks] = []
        self._hubs: list[VirtualHub] = []
        self._ended: set[int] = set()
        super().__init__(size, reactor=reactor, num_cpus=NUM_CPUS, **options)

    @override
    def new_links(self, births: tuple[int, ...]) -> VirtualLinks:
        self._links.append(VirtualLinks(self._reactor, self._model, births))
        return self._links[-1]

    @override
    def new_hub(self, births: tuple[int, ...]) -> VirtualHub:
        self._hubs.append(VirtualHub(self._model, births))
        for birth in sorted(self._ended):
            self._hubs[-1].ended(birth)
        return self._hubs[-1]

    @override
    def new_store(self) -> VirtualStore:
        return VirtualStore(self._model)

    def ended(self, rank: int) -> None:
        """The program of ``rank`` has ended: it enters no further epoch, even if others expect it there."""
        self._ended.add(rank)
        for hub in self._hubs:
            hub.ended(rank)

    def lose(self, one: int, other: int, *, stopped: int | None = None) -> None:
        """These two have heard nothing of each other for too long, in whatever epochs they are."""
        if self._model.lose(one, other):
            for links in self._links:
                links.lose(one, other)
            for hub in self._hubs:
                hub.lose(one, other, stopped=stopped)
