"""Joining the world: every rank claims its number in the store, and waits until all have.

A world may be joined more than once: by a process that closes its communicator and opens another, or by the next
program of a script that the launcher runs. Each time is a *generation*; a rank moves to the next one if it is the same
process again, or if the holder has left. Where rank 0 serves the store, it closes it with its communicator, and each
generation has a store of its own. Any other claim of a taken rank is an error of the second claimant alone.
Ranks that disagree on the size all fail, and show both sizes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import struct
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kfcomm.common.sizes import ranges, ranks_in_words
from kfcomm.common.sockets import RESERVE, raise_limit
from kfcomm.common.version import HOW_TO_AGREE
from kfcomm.errors import ConfigError, RemoteProtocolError, RendezvousError
from kfcomm.rendezvous.host import choose_address, host_and_port, is_loopback
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.keyvalue import Exit, MeetRequest, StoreClosed, Why, loop_now_s
from kfcomm.rendezvous.resolving import once_resolved
from kfcomm.rendezvous.settings import Settings
from kfcomm.rendezvous.worlds import KFCOMM

if TYPE_CHECKING:
    from kfcomm.rendezvous.client import StoreClient
    from kfcomm.rendezvous.store import StoreServer
    from kfcomm.transports.tls import Tls

T = TypeVar("T")

_FAULT = "fault"
_NONCE_NBYTES = 16
_SIZE = struct.Struct("<I")
_MAX_SHOWN = 32
_MAX_GENERATIONS = 1 << 16
_LOOK_S = 0.02
"""Between two looks whether the former store of rank 0 is closed."""
CONNECTIONS_PER_RANK = 3
"""Most connections of a rank to the store, in general."""
KEPT_FOR_S = 10.0
"""Seconds for which a closing rank still serves the store for the others."""
SAID_AFTER_S = 1.0
"""Seconds of waiting after which this is logged."""

logger = logging.getLogger("kfcomm")


@dataclass(frozen=True, slots=True)
class JobStore:
    """Store of the job, as one rank uses it: its client, and the server, if this rank serves it."""

    client: StoreClient
    server: StoreServer | None = None

    @classmethod
    async def open(cls, settings: Settings, tls: Tls | None = None) -> JobStore:
        """Make a client; rank 0 starts the store first, where no launcher has.

        Raises:
            ConfigError: the world has one rank.
            RendezvousError: the store cannot listen there, or rank 0 does not hand the token over.
        """
        from kfcomm.rendezvous.client import StoreClient  # not needed in a world of one

        if settings.store is None:
            raise ConfigError("a world of one has no store")
        token, shown = settings.token, b""
        if token is None:
            await address_towards(None, settings)  # says so early if the store's name does not resolve yet
            from kfcomm.rendezvous.channels import agree_on_token  # few need one

            client = StoreClient(settings.store, b"", timeout_s=settings.timeout_s, tls=tls)
            try:
                token, shown = await agree_on_token(settings, lambda: _reported(client.shown(), settings, client))
            finally:
                await client.close()
        server = None
        if settings.serve and settings.rank == 0:
            from kfcomm.rendezvous.store import StoreServer  # imports aiohttp, which other ranks do not need

            raise_limit(RESERVE + CONNECTIONS_PER_RANK * settings.size)
            host, port = host_and_port(settings.store)
            address = await _address_to_serve(host, port, settings)
            server = await StoreServer.start(address, port, token=token, tls=tls)
            server.shown = shown  # before any client: nothing has been awaited since it listens
        return cls(StoreClient(settings.store, token, timeout_s=settings.timeout_s, tls=tls), server)

    async def leave(
        self, settings: Settings, me: PeerInfo, *, timeout_s: float | None = None, ranks: Sequence[int] | None = None
    ) -> None:
        """Leave the world; not an error if the store is gone already.

        A rank that serves the store waits until as many have left as these (``ranks``; all, if left out), itself
        included, but no longer than ``timeout_s`` seconds (None: `KEPT_FOR_S`), and says so if it lasts. May be
        cancelled.
        """
        timeout_s = KEPT_FOR_S if timeout_s is None else timeout_s
        try:
            generation = await leave(me, self.client, timeout_s=timeout_s)
        except RendezvousError:
            return  # without the store, no process can claim the rank
        if self.server is None or generation is None:
            return
        contents, folder = self.server.store.contents, _left_folder(generation)
        soon_s = min(SAID_AFTER_S, timeout_s)
        ranks = range(settings.size) if ranks is None else ranks
        left = await contents.collect(folder, len(ranks), None, soon_s)
        if len(left) < len(ranks):
            others = ranks_in_words(rank for rank in ranks if str(rank) not in left)
            logger.warning(
                "rank %d: close() waits for %s to close too, since it serves the store, for %.0f s more at the most",
                settings.rank, others, timeout_s - soon_s,
            )  # fmt: skip
            await contents.collect(folder, len(ranks), None, timeout_s - soon_s)

    async def close(self) -> None:
        """Close client and server."""
        await self.client.close()
        if self.server is not None:
            await self.server.close()


async def address_towards(spec: str | None, settings: Settings) -> str:
    """Return the address of this host by which it reaches the store, whose name may not resolve yet.

    Raises:
        ConfigError: see `choose_address`.
        RendezvousError: the name does not resolve within the timeout.
    """
    if settings.store is None:
        raise ConfigError("a world of one has no store")
    towards = host_and_port(settings.store)

    def say(what: str) -> None:
        logger.warning("rank %d: %s", settings.rank, what)

    return await once_resolved(lambda: choose_address(spec, towards), settings.timeout_s, say)


async def _address_to_serve(host: str, port: int, settings: Settings) -> str:
    """Address of the store's name; not loopback, to which some hosts resolve their own name."""
    address = await address_towards(None, settings)
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
    """Register this process and wait until the world is complete; return all peers, by rank.

    A wait of ``stall_after_s`` is reported once, with the missing ranks; it ends after ``timeout_s``, by default that
    of ``settings``.

    Raises:
        RendezvousError: another process holds the rank, the sizes or versions differ, ranks are missing at the end (all
            named), or the store does not answer or refuses the token. At once, with its ``rank``, if one has ended,
            according to its launcher or its connection to the store.
    """
    wait_s = settings.timeout_s if timeout_s is None else timeout_s
    begun_s = loop_now_s()
    generation = await _reported(_claim_in_time(settings, me, client, begun_s + wait_s), settings, client)
    folder = _folder(generation)
    # the later of two claims sees the earlier one: a disagreement is found at once, and waiting ranks are notified
    await _agree_on_size(await client.collect(folder, 1, unless=_FAULT, timeout_s=0), client, folder)
    world = await _meet(settings, client, folder, begun_s, wait_s)
    if missing := _missing(settings, world):
        raise RendezvousError(
            f"after {wait_s:g} s {len(missing)} of {settings.size} ranks have not joined at {client.url}: "
            f"missing {ranges(missing, _MAX_SHOWN)}; joined {ranges(sorted(world), _MAX_SHOWN) or 'none'}"
        )
    peers = tuple(world[rank] for rank in range(settings.size))
    check_versions(me, peers)
    return peers


async def _meet(
    settings: Settings, client: StoreClient, folder: str, begun_s: float, wait_s: float
) -> dict[int, PeerInfo]:
    """Peers that have claimed their ranks, by rank: all of them, unless time is up.

    Raises:
        RendezvousError: they disagree, or a rank has ended.
    """
    deadline_s, report_s = begun_s + wait_s, begun_s + settings.stall_after_s
    # if the program assigns ranks itself, they differ from those of the launcher
    heeds_ends = settings.source == KFCOMM
    request = MeetRequest(folder, settings.rank, settings.size, _FAULT, heeds_ends)
    while True:
        left_s = max(0.0, min(deadline_s, report_s) - loop_now_s())
        found, ends = await client.meet(request, left_s)
        world = {claim.peer.rank: claim.peer for claim in await _agree_on_size(found, client, folder)}
        if len(world) >= settings.size or loop_now_s() >= deadline_s:
            return world
        if ends:
            raise _ended(ends, world)
        if loop_now_s() >= report_s:
            report_s = math.inf
            logger.warning(
                "rank %d has waited for %g s to join: missing %s; joined %s", settings.rank, settings.stall_after_s,
                ranges(_missing(settings, world), _MAX_SHOWN), ranges(sorted(world), _MAX_SHOWN) or 'none',
            )  # fmt: skip


def _ended(ends: Sequence[Exit], world: Mapping[int, PeerInfo]) -> RendezvousError:
    """Error for ranks that will never join: for the first one that blames no other."""
    end = min(ends, key=lambda one: one.why == Why.ELSEWHERE)
    when = "while the others joined" if end.rank in world else "before it joined"
    return RendezvousError(f"the world cannot be joined: {end.describe()} {when}", rank=end.rank)


def _missing(settings: Settings, world: Mapping[int, PeerInfo]) -> list[int]:
    return sorted(set(range(settings.size)) - world.keys())


async def _reported(first: Coroutine[Any, Any, T], settings: Settings, client: StoreClient) -> T:
    """Result of the first requests; logs a warning if the store is not reached for long."""

    def report() -> None:
        logger.warning(
            "rank %d has not reached the store at %s for %g s: %s", settings.rank, client.url, settings.stall_after_s,
            client.trouble or "it does not answer",
        )  # fmt: skip

    timer = asyncio.get_running_loop().call_later(settings.stall_after_s, report)
    try:
        return await first
    finally:
        timer.cancel()


async def leave(me: PeerInfo, client: StoreClient, *, timeout_s: float = 10.0) -> int | None:
    """Report that this process has left the world: another may take its rank in the next generation.

    The last request is for the last generation: the store may close after that.

    Returns:
        Generation that was left; None if this process had not joined.

    Raises:
        RendezvousError: the store is gone, and did not come back within ``timeout_s`` seconds.
    """
    mine = client.joined.pop(me.uid, None) or await _generations_of(me, client, timeout_s)
    # In order: the claim for the last generation lets the store close.
    for generation in mine:
        await client.claim(_left_key(generation, me.rank), b"", timeout_s=timeout_s)
    return mine[-1] if mine else None


async def _generations_of(me: PeerInfo, client: StoreClient, timeout_s: float) -> list[int]:
    """Generations that a process has joined, as the store knows them: it may have been cancelled before it did."""
    mine: list[int] = []
    for generation in range(_MAX_GENERATIONS):
        held = await client.find(_claim_key(generation, me.rank), timeout_s=timeout_s)
        if held is None:
            break
        if _Claim.from_wire(held).peer.uid == me.uid:
            mine.append(generation)
    return mine


class _Claim(NamedTuple):
    """Claim of a rank in the store: the claimant, and its size of the world.

    The nonce distinguishes it from an otherwise equal claim that the same process made before.
    """

    nonce: bytes
    size: int
    peer: PeerInfo

    def to_wire(self) -> bytes:
        return self.nonce + _SIZE.pack(self.size) + self.peer.to_wire()

    @classmethod
    def from_wire(cls, data: bytes) -> _Claim:
        start = _NONCE_NBYTES + _SIZE.size
        try:
            peer = PeerInfo.from_wire(data[start:])
        except RemoteProtocolError as error:
            raise RendezvousError(f"the store has an entry of another version of kfcomm: {error}") from error
        (size,) = _SIZE.unpack(data[_NONCE_NBYTES:start])
        return cls(data[:_NONCE_NBYTES], size, peer)


async def _claim_in_time(settings: Settings, me: PeerInfo, client: StoreClient, deadline_s: float) -> int:
    """Claim the rank, and return the generation; wait for the store of this world, where rank 0 serves one for each.

    A rank that closes its communicator and opens another can be there before rank 0 has closed the former store.
    """
    mine = _Claim(secrets.token_bytes(_NONCE_NBYTES), settings.size, me)
    while True:
        left_s = max(0.0, deadline_s - loop_now_s())
        try:
            return await _claim(mine, client, left_s, most=1 if settings.serve else _MAX_GENERATIONS)
        except StoreClosed as error:
            if not settings.serve or not left_s:
                raise
            client.forget()
            client.trouble = str(error)
        await asyncio.sleep(min(_LOOK_S, left_s))


async def _claim(mine: _Claim, client: StoreClient, timeout_s: float, *, most: int) -> int:
    """Claim the rank in the first generation where it is free, of ``most``; return that generation."""
    me = mine.peer
    for generation in range(most):
        key = _claim_key(generation, me.rank)
        held = _Claim.from_wire(await client.claim(key, mine.to_wire(), timeout_s=timeout_s))
        if held == mine:
            client.joined.setdefault(me.uid, []).append(generation)
            return generation
        if held.peer.uid != me.uid and await client.find(_left_key(generation, me.rank)) is None:
            raise RendezvousError(
                f"rank {me.rank} is taken: {held.peer.describe()} holds it, and {me.describe()} claims it too"
            )
    if most == 1:
        raise StoreClosed(f"the store at {client.url} is that of the world before this one; rank 0 has not closed it")
    raise RendezvousError(f"the world has been joined {most} times; start another store")


async def _agree_on_size(found: Mapping[str, bytes], client: StoreClient, folder: str) -> list[_Claim]:
    """Claims in a folder; if they disagree on the size, notify all waiting ranks and raise."""
    if _FAULT in found:
        raise _told(found[_FAULT].decode(errors="replace"))
    claims = sorted(map(_Claim.from_wire, found.values()), key=lambda claim: claim.peer.rank)
    for claim in claims:
        if claim.size != claims[0].size:
            sides = (f"{each.peer.describe()} says {each.size}" for each in (claims[0], claim))
            fault = f"the ranks disagree on the size of the world: {', '.join(sides)}"
            await client.set(f"{folder}/{_FAULT}", fault.encode())
            raise RendezvousError(fault)
    return claims


def _told(fault: str) -> RendezvousError:
    """Error that another rank or the store reported; the store puts a lost rank first."""
    rank, colon, rest = fault.partition(": ")
    if colon and rank.isascii() and rank.isdigit():
        return RendezvousError(rest, rank=int(rank))
    return RendezvousError(fault)


def check_versions(me: PeerInfo, peers: Sequence[PeerInfo]) -> None:
    """Refuse to join peers of another version of kfcomm, or of its protocol.

    Raises:
        RendezvousError: versions differ; shows all versions, and their ranks.
    """
    ranks: dict[tuple[str, int], set[int]] = {}
    for peer in (me, *peers):
        ranks.setdefault(peer.versions, set()).add(peer.rank)
    if len(ranks) > 1:
        each = sorted(ranks.items(), key=lambda one: min(one[1]))
        sides = (
            f"{ranks_in_words(some)} run{'s' * (len(some) == 1)} kfcomm {version} (protocol {protocol})"
            for (version, protocol), some in each
        )
        raise RendezvousError(f"all ranks must run one version of kfcomm: {'; '.join(sides)}. {HOW_TO_AGREE}")


async def check_job(me: PeerInfo, client: StoreClient) -> None:
    """Refuse to join a running job of another version, whose ranks may not understand this process.

    Raises:
        RendezvousError: versions differ; shows both.
    """
    held = await client.find(_claim_key(0, 0))
    if held is not None:
        check_versions(me, [_Claim.from_wire(held).peer])


def _folder(generation: int) -> str:
    return f"world/{generation}"


def _claim_key(generation: int, rank: int) -> str:
    return f"{_folder(generation)}/{rank}"


def _left_key(generation: int, rank: int) -> str:
    return f"{_left_folder(generation)}/{rank}"


def _left_folder(generation: int) -> str:
    return f"left/{generation}"
