"""The contents of a job's store in etcd, mirrored in the memory of each launcher.

What is below ``PREFIX/``::

    store/KEY    values of the store, and ends of processes
    lease        the lease that all of these have: launchers keep it alive, the end of the job revokes it
    lock         which launcher is the first, with a lease of its own

Writes go to etcd and are done when this mirror has seen them, so that who has claimed a key sees all that was claimed
before. Reads never leave the process. While etcd does not answer, writes wait and reads go on. That a lease ends says
that a job is over or abandoned, never that a process has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from kfcomm.errors import KfcommError, LocalProtocolError, RendezvousError
from kfcomm.rendezvous.backing import Lasting
from kfcomm.rendezvous.board import JOB_RECORD, Closed, Exit
from kfcomm.rendezvous.etcd.address import Address
from kfcomm.rendezvous.etcd.gateway import FIRST_PAUSE_S, LAST_PAUSE_S, Gateway, NotThere, data, end_of, text

KEPT_FOR_S = 600
"""So long the contents stay when no launcher of the job lives; one that is started again within this goes on."""
LOCK_S = 10
"""So long a launcher is taken to be there that is not, at the most."""
BEAT_S = 3.0
PAGE = 64
"""Values at once: a value has half a MiB at the most."""
GOODBYE_S = 3.0

_LOG = logging.getLogger("kfcomm.etcd")


class Mirror(Lasting):
    """See above. Made by `begin`.

    Args:
        gateway: to the etcd.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._root = gateway.address.prefix.encode() + b"/"
        self._store = self._root + b"store/"
        self._lease = ""
        self._lock = ""
        self._revision = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def begin(cls, address: Address, *, is_first: bool, within_s: float) -> Mirror:
        """Reach an etcd and take what it has of the job.

        Args:
            address: of it.
            is_first: whether this is the launcher of the first host, of which there is one.
            within_s: how long to try.

        Raises:
            RendezvousError: it cannot be reached, refuses the user, or another launcher is the first.
        """
        made = cls(Gateway(address))
        try:
            made._lease = await made._shared_lease(within_s)
            if is_first:
                made._lock = await made._locked(within_s)
            await made._load(within_s)
        except BaseException:
            await made._revoke(made._lock)
            await made._gateway.close()
            raise
        made._gateway.is_in_use = True
        loop = asyncio.get_running_loop()
        made._tasks = [loop.create_task(made._follow()), loop.create_task(made._keep_alive())]
        return made

    async def set(self, key: str, value: bytes) -> None:
        """See `Backing`."""
        self.board.check(key, value)
        await self._write("/v3/kv/put", self._put(key, value))

    async def claim(self, key: str, value: bytes) -> bytes:
        """See `Backing`."""
        if (held := self.board.held(key)) is not None:
            return held
        self.board.check(key, value)
        answer = await self._write("/v3/kv/txn", self._unless_held(self._store + key.encode(), value, self._lease))
        if answer.get("succeeded"):
            return value
        (found,) = answer["responses"][0]["response_range"]["kvs"]
        await self._seen(int(found["mod_revision"]))
        return data(found["value"])

    async def report_exit(self, end: Exit) -> None:
        """See `Backing`; an end is known here at once, since no decision depends on who tells of it first."""
        self.board.report_exit(end)
        claim = self._unless_held(self._store + end.key.encode(), end.to_wire(), self._lease)
        await self._write("/v3/kv/txn", claim)

    async def clear(self, *folders: str) -> None:
        """See `Lasting`; what says that there is a job goes last."""
        roots = {key.partition("/")[0] for key, _ in self.board.contents()} - {*folders}
        for root in sorted(roots, key=lambda one: (one == JOB_RECORD, one)):
            folder = self._store + root.encode()
            for first, end in ((folder + b"/", end_of(folder + b"/")), (folder, folder + b"\0")):
                await self._write("/v3/kv/deleterange", {"key": text(first), "range_end": text(end)})

    async def close(self, *, is_over: bool) -> None:
        """See `Lasting`. What an etcd that does not answer keeps ends with its lease."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await self._revoke(*([self._lease] if is_over else []), self._lock)
        self._end()
        await self._gateway.close()

    # ---------------------------------------------------------------- what is written

    def _put(self, key: str, value: bytes) -> dict[str, Any]:
        return {"key": text(self._store + key.encode()), "value": text(value), "lease": self._lease}

    @staticmethod
    def _unless_held(key: bytes, value: bytes, lease: str) -> dict[str, Any]:
        """A transaction that gives a key a value unless it has one, and tells which it has."""
        name = text(key)
        return {
            "compare": [{"key": name, "target": "CREATE", "create_revision": "0"}],
            "success": [{"request_put": {"key": name, "value": text(value), "lease": lease}}],
            "failure": [{"request_range": {"key": name}}],
        }

    async def _write(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Change something, and see it."""
        try:
            answer = await self._gateway.ask(path, fields)
        except NotThere:
            self._is_over("its lease has ended: nobody has kept it alive, or the job is over")
            raise Closed from None
        has_changed = {"put": True, "txn": answer.get("succeeded"), "deleterange": answer.get("deleted")}
        if has_changed[path.rpartition("/")[2]]:
            await self._seen(int(answer["header"]["revision"]))
        return answer

    async def _seen(self, revision: int) -> None:
        """Wait until all changes up to a revision are here."""
        if self._revision < revision and not self.board.is_closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((revision, waiter))
            await waiter
        if self.board.is_closed:
            raise Closed

    # ---------------------------------------------------------------- what is read

    async def _load(self, within_s: float) -> None:
        """All that is there now, in the order in which it came to be so."""
        rows: list[Mapping[str, Any]] = []
        first, at = self._store, 0
        while True:
            fields = {
                "key": text(first), "range_end": text(end_of(self._store)), "limit": str(PAGE), "revision": str(at),
            }  # fmt: skip
            answer = await self._gateway.ask("/v3/kv/range", fields, within_s=within_s)
            at = at or int(answer["header"]["revision"])
            rows += answer.get("kvs", ())
            if not answer.get("more"):
                break
            first = data(rows[-1]["key"]) + b"\0"
        found = {data(row["key"]): row for row in rows}
        for gone in [key for key, _ in self.board.contents() if self._store + key.encode() not in found]:
            self.board.drop(gone)
        for key, row in sorted(found.items(), key=lambda one: int(one[1]["mod_revision"])):
            self._take(key, data(row.get("value", "")))
        self._reached(at)

    async def _follow(self) -> None:
        """Take what changes, from one member or another."""
        pause_s = FIRST_PAUSE_S
        while not self.board.is_closed:
            async for result in self._gateway.watch(self._root, end_of(self._root), self._revision + 1):
                if int(result.get("compact_revision", 0)) > self._revision:
                    # what has changed meanwhile is not told any more
                    with contextlib.suppress(RendezvousError):
                        await self._load(LAST_PAUSE_S)
                    break
                pause_s = FIRST_PAUSE_S
                self._take_all(result)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            if pause_s == LAST_PAUSE_S:
                self._gateway.next_member()

    def _take_all(self, result: Mapping[str, Any]) -> None:
        events = result.get("events", ())
        for event in events:
            key = data(event["kv"]["key"])
            is_gone = event.get("type") == "DELETE"
            if is_gone and key == self._root + b"lease":
                self._is_over("the job is over")
                return
            if is_gone and key.startswith(self._store):
                self.board.drop(key.removeprefix(self._store).decode())
            elif not is_gone:
                self._take(key, data(event["kv"].get("value", "")))
        if events:
            self._reached(int(events[-1]["kv"]["mod_revision"]))

    def _take(self, key: bytes, value: bytes) -> None:
        if not key.startswith(self._store):
            return
        try:
            self.board.take(key.removeprefix(self._store).decode(), value)
        except (LocalProtocolError, UnicodeDecodeError) as error:
            _LOG.warning("%s has what is left out: %s", self._gateway.address, error)

    def _reached(self, revision: int) -> None:
        self._revision = max(self._revision, revision)
        due = [one for one in self._waiters if one[0] <= self._revision]
        self._waiters = [one for one in self._waiters if one[0] > self._revision]
        for _, waiter in due:
            if not waiter.done():
                waiter.set_result(None)

    # ---------------------------------------------------------------- leases

    async def _shared_lease(self, within_s: float) -> str:
        """That of the job: the one which is there, or a new one."""
        mine = await self._granted(KEPT_FOR_S, within_s)
        claim = self._unless_held(self._root + b"lease", mine.encode(), mine)
        answer = await self._gateway.ask("/v3/kv/txn", claim, within_s=within_s)
        if answer.get("succeeded"):
            return mine
        await self._revoke(mine)
        return data(answer["responses"][0]["response_range"]["kvs"][0]["value"]).decode()

    async def _granted(self, ttl_s: int, within_s: float) -> str:
        answer = await self._gateway.ask("/v3/lease/grant", {"TTL": str(ttl_s)}, within_s=within_s)
        return str(answer["ID"])

    async def _locked(self, within_s: float) -> str:
        """A lease that says that this launcher is the first. One that has just been killed is waited for.

        Raises:
            RendezvousError: another one is.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LOCK_S + BEAT_S
        mine = await self._granted(LOCK_S, within_s)
        key, me = self._root + b"lock", _myself()
        while True:
            answer = await self._gateway.ask("/v3/kv/txn", self._unless_held(key, me, mine), within_s=within_s)
            if answer.get("succeeded"):
                return mine
            held = answer["responses"][0]["response_range"]["kvs"][0]
            there = data(held["value"])
            if there == me:
                return mine
            lives = _is_known_to_live(there)
            if lives is False:
                compare = {"key": text(key), "target": "MOD", "mod_revision": held["mod_revision"]}
                gone = {"compare": [compare], "success": [{"request_delete_range": {"key": text(key)}}]}
                await self._gateway.ask("/v3/kv/txn", gone, within_s=within_s)
                continue
            if lives or loop.time() >= deadline_s:
                await self._revoke(mine)
                raise RendezvousError(
                    f"{self._gateway.address} is used by another launcher, {_described(there)}: a job has one first one"
                )
            await asyncio.sleep(LAST_PAUSE_S / 2)
            await self._gateway.ask("/v3/lease/keepalive", {"ID": mine}, within_s=within_s)

    async def _keep_alive(self) -> None:
        try:
            while not self.board.is_closed:
                await asyncio.sleep(BEAT_S)
                if self._lock and not await self._is_kept(self._lock):
                    self._lock = await self._locked(KEPT_FOR_S)
                if not await self._is_kept(self._lease):
                    self._is_over("its lease has ended")
        except KfcommError as error:
            self._is_over(str(error))

    async def _is_kept(self, lease: str) -> bool:
        answer = await self._gateway.ask("/v3/lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def _revoke(self, *leases: str) -> None:
        for lease in filter(None, leases):
            with contextlib.suppress(RendezvousError):
                await self._gateway.ask("/v3/lease/revoke", {"ID": lease}, within_s=GOODBYE_S)

    def _is_over(self, why: str) -> None:
        if not self.board.is_closed and self._tasks:
            _LOG.warning("the store in %s has ended: %s", self._gateway.address, why)
        self._end()

    def _end(self) -> None:
        self.board.close()
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _myself() -> bytes:
    pid = os.getpid()
    who: bytes = msgpack.packb([socket.gethostname(), *_machine(), pid, _begun(pid), secrets.token_bytes(8)])
    return who


def _machine() -> tuple[str, str]:
    """Where numbers of processes mean the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _begun(pid: int) -> str:
    """When a process began, which tells it from another of this number (proc_pid_stat(5)); empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_known_to_live(other: bytes) -> bool | None:
    """Whether a launcher lives; None if that cannot be known here, since it was on another machine."""
    _, *machine, pid, begun, _ = msgpack.unpackb(other)
    return None if tuple(machine) != _machine() else _begun(pid) == begun


def _described(other: bytes) -> str:
    host, _, _, pid, _, _ = msgpack.unpackb(other)
    return f"process {pid} on {host}"
