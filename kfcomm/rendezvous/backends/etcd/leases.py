"""The lease of a job's keys in etcd, and the lock that elects the first launcher.

The first launcher ends the lease when the job is over, after it has written that into the key that names the lease. If
a lease ends otherwise (it was revoked, or etcd was unreachable for longer than it lasts) the job survives: the first
launcher gets another lease, and the others wait for that.

A request whose answer was lost may have been carried out, and is repeated. So each claim has a unique value, by which
a process recognises its own claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.backends.etcd.gateway import LAST_PAUSE_S, Gateway, data, text
from kfcomm.rendezvous.host import hostname

KEPT_FOR_S = 600
"""Seconds for which the values outlive all launchers; one that restarts in time continues the job."""
LOCK_S = 10
"""Seconds after which a dead launcher loses its lock."""
BEAT_S = 3.0
GOODBYE_S = 3.0
ABANDONED_AFTER_S = 60.0
"""Seconds after the end of the lease after which a job without a first launcher is over for the others."""

_OVER = b" over"
"""Suffix of the number of the lease when the job is over."""


class Lease:
    """The lease of a job, as one launcher knows it; its number is the value of ``key``.

    ``lost`` is called when it has ended before the job, ``over``, with the reason, when the job is over.
    """

    def __init__(self, gateway: Gateway, key: bytes, lost: Callable[[], None], over: Callable[[str], None]) -> None:
        self.number = ""
        self._gateway = gateway
        self._key = key
        self._lost = lost
        self._over = over
        self._there = asyncio.Event()
        self._abandoned: asyncio.TimerHandle | None = None

    @property
    def is_there(self) -> bool:
        """Whether it has not ended, as far as known."""
        return self._there.is_set()

    async def wait(self) -> str:
        """Its number, once there is one; or the last one, after `end`."""
        await self._there.wait()
        return self.number

    async def share(self, within_s: float = math.inf) -> str:
        """Number of the existing lease, or of a new one; see `has`.

        Raises:
            RendezvousError: etcd cannot be reached in time, or refuses.
        """
        while True:
            mine = await granted(self._gateway, KEPT_FOR_S, within_s)
            claim = unless_held(self._key, mine.encode(), mine)
            answer = await self._gateway.ask("/v3/kv/txn", claim, within_s=within_s)
            held = mine.encode() if answer.get("succeeded") else held_by(answer)[1]
            if held == mine.encode():
                return mine
            await revoke(self._gateway, mine)
            if not held.endswith(_OVER):
                return held.decode()
            await revoke(self._gateway, held.removesuffix(_OVER).decode())  # the finished job did not get to revoke it

    def has(self, number: str) -> None:
        """Use this lease from now on."""
        self.number = number
        self._there.set()
        self._cancel()

    def has_ended(self, number: str) -> None:
        """Note the end of a lease, this one or an earlier one."""
        if number == self.number and self.is_there:
            self._there.clear()
            why = "its lease has ended, and no first launcher has taken it up"
            self._abandoned = asyncio.get_running_loop().call_later(ABANDONED_AFTER_S, self._over, why)
            self._lost()

    def hear(self, value: bytes | None) -> None:
        """Handle the value of its key, or the loss of the key."""
        if value is None:
            self.has_ended(self.number)
        elif value.endswith(_OVER):
            self._over("the job is over")
        else:
            self.has(value.decode())

    async def keep(self) -> None:
        """Keep it alive."""
        number = self.number
        if self.is_there and not await is_kept(self._gateway, number):
            self.has_ended(number)

    async def say_over(self) -> None:
        """Tell the other launchers that the job is over, before the lease is revoked."""
        over = {"key": text(self._key), "value": text(self.number.encode() + _OVER), "lease": self.number}
        with contextlib.suppress(RendezvousError):
            await self._gateway.ask("/v3/kv/put", over, within_s=GOODBYE_S)

    def end(self) -> None:
        """Release all waiters."""
        self._there.set()
        self._cancel()

    def _cancel(self) -> None:
        if self._abandoned is not None:
            self._abandoned.cancel()
            self._abandoned = None


def unless_held(key: bytes, value: bytes, lease: str) -> dict[str, Any]:
    """Transaction that gives a key a value unless it has one, and returns that; see `held_by`."""
    name = text(key)
    return {
        "compare": [{"key": name, "target": "CREATE", "create_revision": "0"}],
        "success": [{"request_put": {"key": name, "value": text(value), "lease": lease}}],
        "failure": [{"request_range": {"key": name}}],
    }


def held_by(answer: Mapping[str, Any]) -> tuple[int, bytes]:
    """Revision and value of the key that such a transaction has found; the gateway omits empty fields."""
    row = answer["responses"][0]["response_range"]["kvs"][0]
    return int(row["mod_revision"]), data(row.get("value", ""))


async def granted(gateway: Gateway, ttl_s: int, within_s: float) -> str:
    """New lease; if the answer is lost, an extra one expires."""
    answer = await gateway.ask("/v3/lease/grant", {"TTL": str(ttl_s)}, within_s=within_s)
    return str(answer["ID"])


async def is_kept(gateway: Gateway, lease: str) -> bool:
    """Keep a lease alive; return whether it exists."""
    answer = await gateway.ask("/v3/lease/keepalive", {"ID": lease})
    return int(answer.get("result", {}).get("TTL", 0)) > 0


async def revoke(gateway: Gateway, *leases: str) -> None:
    """Revoke leases; ignore errors."""
    for lease in filter(None, leases):
        with contextlib.suppress(RendezvousError):
            await gateway.ask("/v3/lease/revoke", {"ID": lease}, within_s=GOODBYE_S)


async def locked(gateway: Gateway, key: bytes, within_s: float) -> str:
    """Lease of the lock that makes this launcher the first one. Waits for a killed holder to expire.

    Raises:
        RendezvousError: another launcher holds the lock.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + LOCK_S + BEAT_S
    mine = await granted(gateway, LOCK_S, within_s)
    me = _myself()
    while True:
        answer = await gateway.ask("/v3/kv/txn", unless_held(key, me, mine), within_s=within_s)
        if answer.get("succeeded"):
            return mine
        revision, there = held_by(answer)
        if there == me:
            return mine
        lives = _is_known_to_live(there)
        if lives is False:
            compare = {"key": text(key), "target": "MOD", "mod_revision": str(revision)}
            gone = {"compare": [compare], "success": [{"request_delete_range": {"key": text(key)}}]}
            await gateway.ask("/v3/kv/txn", gone, within_s=within_s)
            continue
        if lives or loop.time() >= deadline_s:
            await revoke(gateway, mine)
            raise RendezvousError(
                f"{gateway.address} is used by another launcher, {_described(there)}: a job has one first launcher"
            )
        await asyncio.sleep(LAST_PAUSE_S / 2)
        await gateway.ask("/v3/lease/keepalive", {"ID": mine}, within_s=within_s)


def _myself() -> bytes:
    pid = os.getpid()
    who: bytes = msgpack.packb([hostname(), *_machine(), pid, _begun(pid), secrets.token_bytes(8)])
    return who


def _machine() -> tuple[str, str]:
    """Boot and PID namespace: within them a process id is unique."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _begun(pid: int) -> str:
    """Start time of a process, to detect a reused id (proc_pid_stat(5)); empty if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_known_to_live(other: bytes) -> bool | None:
    """Whether a launcher lives; None if unknown, since it was on another machine."""
    _, *machine, pid, begun, _ = msgpack.unpackb(other)
    return None if tuple(machine) != _machine() else _begun(pid) == begun


def _described(other: bytes) -> str:
    host, _, _, pid, _, _ = msgpack.unpackb(other)
    return f"process {pid} on {host}"
