"""How the launcher of another host comes to its job: to the position that it has from the beginning, or to a new one.

What they tell each other lies in folders of the store::

    folder       who writes               what it says
    -----------  -----------------------  ----------------------------------------------------------------
    launched/P   a launcher               who has come for position P; nobody else can
    comers/N     a launcher               of which host it is, and that it wants a new position
    admitted/N   the first                that it has the N-th one after those of the beginning; or why not

A position is that of one launcher, as long as it lives: whoever comes back to a host has another one, since what was
said to the launcher before, or of it, still lies in the store. The first launcher gives it away when the one before is
known to be gone, and not while that one is heard.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable

import msgpack

from kfcomm.errors import RendezvousError
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.hosts import Plan
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.interfaces import hostname
from kfcomm.rendezvous.keyvalue import ADMITTED, BOUNDS, COMERS, LAUNCHED, LAUNCHERS, LEAVING, KeyValue, StoreClosed

LOOK_EVERY_S = 0.5
_POLL_S = 2.0
_MISSED_AFTER_S = 15.0
_COMES_WITHIN_S = 5.0
"""Whoever has been given a position takes it at once, unless it has ended."""

logger = logging.getLogger("kfcomm")


class NotNeeded(RendezvousError):
    """The job was over before it had a use for this host."""


def who_launches() -> bytes:
    """This launcher, which no other is."""
    return f"process {os.getpid()} on {hostname()} ({secrets.token_hex(8)})".encode()


async def arrive(
    client: StoreClient, store: KeyValue, plan: Plan, me: bytes, within_s: float, *, is_elastic: bool
) -> int:
    """Tell the first host's store that the launcher of a host has come, be it at the beginning or later.

    Args:
        client: of that store.
        store: where that is kept; the same one, or a part of it here.
        plan: who begins where, with this host.
        me: who has come; see `who_launches`.
        within_s: for which a store of a job that is over may still be there.
        is_elastic: whether a launcher may come later, or in the place of one that is gone.

    Returns:
        The position that this launcher has.

    Raises:
        NotNeeded: the job has ended meanwhile.
        RendezvousError: another launcher runs on this host, or has; or the store cannot be reached.
    """
    loop = asyncio.get_running_loop()
    deadline_s, is_told = loop.time() + within_s, False
    while True:
        try:
            held = b"" if plan.is_late else await store.claim(f"{LAUNCHED}/{plan.here}", me)
            if held == me:
                await client.arrive(plan.here)
                return plan.here
            if not is_elastic:
                raise RendezvousError(_taken(held))
            await store.find(BOUNDS)  # it may not be there yet
            if plan.is_late and not is_told:
                logger.warning("this host, as %s, waits until --discover names it", plan.address)
                is_told = True
            position = await _new_position(store, plan, me, max(within_s, _MISSED_AFTER_S))
            if position is not None and await store.claim(f"{LAUNCHED}/{position}", me) == me:
                await client.arrive(position)
                return position
        except StoreClosed as error:
            client.identity = b""  # another job may begin in its place: this launcher may be of that
            if loop.time() >= deadline_s:
                raise NotNeeded("the job ended before it had a use for this host") from error
        await asyncio.sleep(LOOK_EVERY_S)


async def _new_position(store: KeyValue, plan: Plan, me: bytes, patience_s: float) -> int | None:
    """Ask for a position, and wait until it is given; None if that is forgotten, as by a job that begins anew.

    Raises:
        RendezvousError: it is refused; or the store is gone for longer than ``patience_s``.
    """
    loop = asyncio.get_running_loop()
    asked: bytes = msgpack.packb([plan.address, me])
    number, heard_s = 0, loop.time()
    while not number or await store.claim(f"{COMERS}/{number}", asked) != asked:
        number = 1 + len(await store.collect(COMERS, 0, timeout_s=0.0))
    answers: dict[str, bytes] = {}
    while (told := answers.get(str(number))) is None:
        try:
            comers = await store.collect(COMERS, 0, timeout_s=0.0)
            if comers.get(str(number)) != asked:
                return None
            # whoever waits in it hears when it is closed
            answers = await store.collect(ADMITTED, len(answers) + 1, timeout_s=_POLL_S)
            heard_s = loop.time()
        except StoreClosed:
            raise
        except RendezvousError:
            if loop.time() - heard_s > patience_s:
                raise
            await asyncio.sleep(LOOK_EVERY_S)
    if told:
        raise RendezvousError(told.decode(errors="replace"))
    return plan.num_first - 1 + number


def expect_those_admitted(store: LocalStore, plan: Plan, elastic: Elasticity) -> None:
    """Whoever was given a position by a first launcher that has ended since has it still."""
    for name, told in store.contents.folder(ADMITTED).items():
        if not told and (asked := store.contents.held(f"{COMERS}/{name}")) is not None:
            elastic.expect(plan.num_first - 1 + int(name), msgpack.unpackb(asked)[0])


async def admit(store: LocalStore, plan: Plan, elastic: Elasticity, arrived: Callable[[str], None]) -> None:
    """Give positions to the launchers that ask for one, on the first host; never returns.

    Args:
        store: of the job.
        plan: who begins where.
        elastic: which hosts there are, and have slots; is told of those that have come.
        arrived: told of the address of each of them.
    """
    loop = asyncio.get_running_loop()
    since_s: dict[str, float] = {}
    begun_s = loop.time()
    while True:
        gone = _gone(store)
        for position, place in enumerate(elastic.places):
            if place.is_gone and str(position) not in gone and store.contents.heard_s.get(position, 0.0) > begun_s:
                place.is_gone = False
                arrived(place.address)
        for name in sorted(store.contents.folder(COMERS).keys() - store.contents.folder(ADMITTED).keys(), key=int):
            address, _ = msgpack.unpackb(store.contents.held(f"{COMERS}/{name}") or b"")
            refusal = _refusal(store, elastic, address, since_s.setdefault(name, loop.time()), loop.time())
            if refusal == "":
                elastic.expect(plan.num_first - 1 + int(name), address)
            if refusal is not None:
                await store.claim(f"{ADMITTED}/{name}", refusal.encode())
        await asyncio.sleep(LOOK_EVERY_S)


def _refusal(store: LocalStore, elastic: Elasticity, address: str, since_s: float, now_s: float) -> str | None:
    """Why a launcher of this host, which asks since then, has no place; empty if it has; None if that is open yet."""
    if address == elastic.places[0].address:
        return _taken(b"that of the first host")
    if elastic.slots is not None and address not in elastic.slots:
        return None
    gone = _gone(store)
    for position, place in enumerate(elastic.places):
        if place.address != address or str(position) in gone:
            continue
        heard_s, who = store.contents.heard_s.get(position), store.contents.held(f"{LAUNCHED}/{position}")
        if heard_s is not None and heard_s > since_s:
            return _taken(who or b"")
        if who is not None or now_s - since_s < _COMES_WITHIN_S:
            return None
    return ""


def _gone(store: LocalStore) -> set[str]:
    """Positions whose launchers are gone."""
    return store.contents.folder(LEAVING).keys() | store.contents.folder(LAUNCHERS).keys()


def _taken(who: bytes) -> str:
    told = f": {who.decode(errors='replace')}" if who else ""
    return f"another launcher has come for this host before{told}; a job has one on each host at a time"
