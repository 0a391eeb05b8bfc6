"""The device of this rank as it joins: found before, told to the others, and set up with what they have told.

Frameworks are imported here at the earliest: on a thread, and only where a device has not been refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kfcomm.arrays.devices import Device, DeviceReport, routes
from kfcomm.rendezvous.settings import Settings
from kfcomm.transports.base import DeviceSetup
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.transports.base import BackendMaker

logger = logging.getLogger("kfcomm")


class Accelerator(NamedTuple):
    """Device of one rank.

    Attributes:
        device: None without one.
        report: what the others are told of it, or of why there is none.
        maker: of backends on it; None if nothing runs collectives on it.
    """

    device: Device | None
    report: DeviceReport
    maker: BackendMaker | None

    async def close(self) -> None:
        """Close a device that no session has taken over."""
        if self.device is not None:
            await asyncio.to_thread(self.device.close)


def look(settings: Settings) -> Accelerator:
    """Find the device of this rank. Blocks for as long as the import of a framework takes.

    Raises:
        ConfigError: a device was asked for by name, and there is none, or it cannot be used; says what would help.
    """
    if settings.device == "none":
        return Accelerator(None, DeviceReport(lack="device 'none' was asked for"), None)
    # before joining nobody but the launcher knows which ranks are on this host
    device, report = routes.find(settings.device, settings.local_rank)
    if not report.backend:
        return Accelerator(device, report, None)
    from kfcomm.transports.nccl import Nccl

    return Accelerator(device, report, Nccl())


async def find(settings: Settings) -> Accelerator:
    """As `look`, without holding up the loop."""
    return look(settings) if settings.device == "none" else await asyncio.to_thread(look, settings)


def set_up(
    settings: Settings, own: Accelerator, reports: Sequence[DeviceReport], layout: Layout, transport: str
) -> DeviceSetup:
    """The devices of a world that all ranks have joined; rank 0 logs which way device memory goes, and what slows it.

    Args:
        settings: of this rank.
        own: what this rank has.
        reports: of all ranks.
        layout: of all ranks.
        transport: what all have agreed on.
    """
    setup = DeviceSetup(own.device, tuple(reports), own.maker, transport)
    choice = setup.route(range(layout.size), layout)
    if settings.rank == 0 and choice is not None:
        logger.info("device memory goes by %s", choice)
        for caution in routes.cautions(reports, transport, is_device_named=settings.device != "auto"):
            logger.warning("%s", caution)
    return setup
