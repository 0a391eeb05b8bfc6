"""Choice of the path of an order in one group, from facts that all its ranks know, so that all choose alike.

Paths exist from the beginning, to hear messages of other ranks, unless no rank has a device: then they are not even
imported. They touch no device before their first order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kfcomm.arrays.devices import Device
from kfcomm.arrays.devices.pinned import PinnedPool
from kfcomm.arrays.devices.routes import Choice, Route
from kfcomm.collectives.group import Group
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.core.collective import GroupView
from kfcomm.strategies import build
from kfcomm.transports.base import BackendMaker
from kfcomm.types import Layout, Verb

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.calls import Order, Path

NewGroup = Callable[[str, Sequence[int]], tuple[GroupView, Layout]]
"""The view and the layout of some of a group's ranks; see ``GroupTable.add``."""


@dataclass(slots=True, eq=False)
class Paths:
    """The paths of one group.

    Attributes:
        group: of whom.
        mailbox: of the group.
        device, maker: of this rank; None without a device.
        choice: of the group; None where no rank has a device.
        new_group: makes the groups inside of hosts, and across them.
        pool_of: pinned memory for a device.
    """

    group: Group
    mailbox: Mailbox
    device: Device | None
    maker: BackendMaker | None
    choice: Choice | None
    new_group: NewGroup
    pool_of: Callable[[Device], PinnedPool]
    _made: dict[Route, Path] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.choice is not None:
            self._made = {route: self._make(route) for route in {Route.STAGED, self.choice.route}}

    def of(self, order: Order) -> Path:
        """The path of an order."""
        return self._made[self._route(order)]

    def never_began(self, key: str, seq: int) -> None:
        """A call of this rank failed before anybody could tell which path it would take."""
        for path in self._made.values():
            path.never_began(key, seq)

    def hurry(self) -> None:
        """Somebody waits for calls to be over."""
        for path in self._made.values():
            path.hurry()

    def close(self) -> None:
        """Nothing follows; what was begun has failed. May be called again."""
        made, self._made = self._made, {}
        for path in made.values():
            path.close()

    def _route(self, order: Order) -> Route:
        choice, maker = self.choice, self.maker
        if choice is None or maker is None or choice.route is Route.STAGED:
            return Route.STAGED
        if not maker.supports(order.verb, order.dtype, order.op):
            return Route.STAGED
        if choice.route is Route.HIERARCHY:
            return Route.HIERARCHY if order.verb is Verb.ALL_REDUCE and not order.counts else Route.STAGED
        is_even = order.verb is not Verb.REDUCE_SCATTER or order.shape[0] % self.group.view.size == 0
        return Route.BACKEND if is_even else Route.STAGED

    def _make(self, route: Route) -> Path:
        from kfcomm.collectives.on_device.backed import BackendPath
        from kfcomm.collectives.on_device.staged import StagedPath

        device, maker = self.device, self.maker
        if route is Route.STAGED or device is None or maker is None:
            return StagedPath(self.group, self.pool_of)
        if route is Route.BACKEND:
            return BackendPath(self.group, device, maker, self.mailbox)

        # Groups of the ranks of this host, and of those with the same place on every host.
        from kfcomm.collectives.on_device.hierarchy import HierarchicalPath

        layout, rank = self.group.layout, self.group.view.rank
        here = layout.ranks_of(layout.hosts[rank])
        place = here.index(rank)
        there = [layout.ranks_of(host)[place] for host in range(layout.num_hosts)]
        inside = self._subgroup("\0inside", here)
        across = self._subgroup("\0across", there)
        mailbox = Mailbox(inside.engine, inside.view, inside.timeout_s)
        return HierarchicalPath(
            BackendPath(inside, device, maker, mailbox, follows=False), StagedPath(across, self.pool_of), inside,
            across, device, mailbox,
        )  # fmt: skip

    def _subgroup(self, name: str, ranks: Sequence[int]) -> Group:
        view, layout = self.new_group(name, ranks)
        group = self.group
        return Group(group.engine, view, layout, build("auto", layout), group.timeout_s)
