"""The devices of a world, as one rank knows them: its own, and what every rank has told of its.

Invariants: reports and transport are the same on all ranks, so that all take the same route for a group. This
module finds no device and makes no backend: both are given to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kfcomm.arrays.devices.base import Device, DeviceReport
from kfcomm.arrays.devices.routes import Choice, choose
from kfcomm.transports.backend import BackendMaker
from kfcomm.types import Layout


class DeviceSetup(NamedTuple):
    """The devices of a world.

    Attributes:
        device: that of this rank; None if it has none.
        reports: of all ranks, by rank in the world.
        maker: of backends on the device; None if nothing runs collectives on it.
        transport: what all ranks have agreed on, see ``routes.agree``.
    """

    device: Device | None
    reports: tuple[DeviceReport, ...]
    maker: BackendMaker | None
    transport: str

    @classmethod
    def none(cls, size: int) -> DeviceSetup:
        """That of a world of ``size`` ranks without a device."""
        return cls(None, (DeviceReport(),) * size, None, "auto")

    def route(self, members: Sequence[int], layout: Layout) -> Choice | None:
        """The route of device memory in a group; None in a world without devices.

        Args:
            members: their ranks in the world, by rank in the group.
            layout: hosts of the members.

        Raises:
            ConfigError: see ``routes.choose``.
        """
        if not any(report.kind for report in self.reports):
            return None
        return choose([self.reports[rank] for rank in members], layout, self.transport, members)
