"""Joining the world: every rank claims its number in the store, and waits until all have.

A world may be joined more than once: by a process that closes its communicator and opens another, or by the
next program of a script that the launcher runs. Each time is a *generation*; a rank goes to the next one if it
is the same process again, or if the holder has said that it left. Any other claim of a taken rank is an error
of the second one alone; the first is not disturbed. Ranks that disagree on the size all fail, and show both.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kfcomm.errors import ConfigError, RemoteProtocolError, RendezvousError
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.interfaces import choose_address, is_loopback
from kfcomm.rendezvous.settings import Settings, host_and_port

if TYPE_CHECKING:
    from kfcomm.rendezvous.client import StoreClient
    from kfcomm.rendezvous.store import StoreServer

_FAULT = "fault"
_NONCE_NBYTES = 16
_MAX_SHOWN = 32
_MAX_GENERATIONS = 1 << 16


async def open_store(settings: Settings) -> tuple[StoreClient, StoreServer | None]:
    """A client of the job's store; rank 0 starts the store first, where no launcher has.

    Both are the caller's to close, the client first.

    Raises:
        ConfigError: the settings are those of a world of one.
        RendezvousError: the store cannot listen there.
    """
    from kfcomm.rendezvous.client import StoreClient  # the HTTP library, which a world of one does without
    from kfcomm.rendezvous.store import StoreServer

    if settings.store is None or settings.token is None:
        raise ConfigError("a world of one has no store")
    server = None
    if settings.serve and settings.rank == 0:
        host, port = host_and_port(settings.store)
        server = await StoreServer.start(await _address_to_serve(host, port, settings), port, token=settings.token)
    return StoreClient(settings.store, settings.token, timeout_s=settings.timeout_s), server


async def _address_to_serve(host: str, port: int, settings: Settings) -> str:
    """The address behind the store's name; not the loopback one that some hosts give their own name."""
    address = await asyncio.to_thread(choose_address, None, (host, port))
    if is_loopback(address) and not is_loopback(host):
        if settings.interface is None:
            raise ConfigError(
                f"rank 0 resolves the store's host {host!r} to {address}, which no other host can reach; "
                "set KFCOMM_INTERFACE to an interface, address or network of this host"
            )
        return choose_address(settings.interface, (host, port))
    return address


async def join(
    settings: Settings, me: PeerInfo, client: StoreClient, *, timeout_s: float | None = None
) -> tuple[PeerInfo, ...]:
    """Register this process and wait until the world is complete.

    Args:
        settings: rank and size.
        me: what the others are told of this process; its rank must be that of ``settings``.
        client: of the job's store.
        timeout_s: how long to wait; None for the timeout of ``settings``.

    Returns:
        All ``size`` peers, by rank.

    Raises:
        RendezvousError: another process holds the rank, the sizes or protocols differ, ranks are missing in the
            end (all named), or the store does not answer or refuses the token.
    """
    wait_s = settings.timeout_s if timeout_s is None else timeout_s
    deadline_s = _now_s() + wait_s
    generation = await _claim(me, client, wait_s)
    await _agree_on_size(settings.size, me, client, generation)
    left_s = max(0.0, deadline_s - _now_s())
    found = await client.collect(_folder(generation), settings.size, unless=_FAULT, timeout_s=left_s)
    if _FAULT in found:
        raise RendezvousError(found[_FAULT].decode(errors="replace"))
    world = {peer.rank: peer for peer in map(_read, found.values())}
    if missing := sorted(set(range(settings.size)) - world.keys()):
        raise RendezvousError(
            f"after {wait_s:g} s {len(missing)} of {settings.size} ranks have not joined at {client.url}: "
            f"missing {_abridged(missing)}; joined {_abridged(sorted(world))}"
        )
    peers = tuple(world[rank] for rank in range(settings.size))
    _check_protocols(me, peers)
    return peers


async def leave(me: PeerInfo, client: StoreClient) -> None:
    """Say that this process has left the world: another may take its rank in the next generation.

    Raises:
        RendezvousError: the store is gone.
    """
    for generation in range(_MAX_GENERATIONS):
        held = await client.find(_claim_key(generation, me.rank))
        if held is None:
            return
        if _read(held).uid == me.uid:
            await client.set(_left_key(generation, me.rank), b"")


async def _claim(me: PeerInfo, client: StoreClient, timeout_s: float) -> int:
    """Take the rank in the first generation where it is free; returns that generation."""
    # tells this claim from one that the same process made before, with all else the same
    mine = secrets.token_bytes(_NONCE_NBYTES) + me.to_wire()
    for generation in range(_MAX_GENERATIONS):
        held = await client.claim(_claim_key(generation, me.rank), mine, timeout_s=timeout_s)
        if held == mine:
            return generation
        holder = _read(held)
        if holder.uid != me.uid and await client.find(_left_key(generation, me.rank)) is None:
            raise RendezvousError(
                f"rank {me.rank} is taken: {holder.describe()} holds it, and {me.describe()} claims it too"
            )
    raise RendezvousError(f"the world has been joined {_MAX_GENERATIONS} times; start another store")


async def _agree_on_size(size: int, me: PeerInfo, client: StoreClient, generation: int) -> None:
    """Compare the size with that of the first to come; a difference is told to all who wait."""
    said = f"{me.describe()} says {size}"
    held = await client.claim(f"size/{generation}", f"{size} {said}".encode())
    theirs, _, first = held.decode(errors="replace").partition(" ")
    if theirs == str(size):
        return
    fault = f"the ranks disagree on the size of the world: {first}, {said}"
    await client.set(f"{_folder(generation)}/{_FAULT}", fault.encode())
    raise RendezvousError(fault)


def _check_protocols(me: PeerInfo, peers: Sequence[PeerInfo]) -> None:
    for peer in peers:
        if peer.versions[1] != me.versions[1]:
            raise RendezvousError(
                f"{peer.describe()} speaks protocol {peer.versions[1]} (kfcomm {peer.versions[0]}), "
                f"{me.describe()} speaks {me.versions[1]} (kfcomm {me.versions[0]})"
            )


def _read(held: bytes) -> PeerInfo:
    try:
        return PeerInfo.from_wire(held[_NONCE_NBYTES:])
    except RemoteProtocolError as error:
        raise RendezvousError(f"the store holds what no peer of this version wrote: {error}") from error


def _abridged(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN])) or "none"
    return shown if len(ranks) <= _MAX_SHOWN else f"{shown} and {len(ranks) - _MAX_SHOWN} more"


def _folder(generation: int) -> str:
    return f"world/{generation}"


def _claim_key(generation: int, rank: int) -> str:
    return f"{_folder(generation)}/{rank}"


def _left_key(generation: int, rank: int) -> str:
    return f"left/{generation}/{rank}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
