"""Waiting until a descriptor is ready. Unlike the loops' own calls these take and send nothing themselves."""

from __future__ import annotations

import asyncio


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read: or accepted from; of a process, until it has ended."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_reader(descriptor)


async def writable(descriptor: int) -> None:
    """Wait until a descriptor can be written, or never again."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    loop.add_writer(descriptor, _wake, waiter)
    try:
        await waiter
    finally:
        loop.remove_writer(descriptor)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
