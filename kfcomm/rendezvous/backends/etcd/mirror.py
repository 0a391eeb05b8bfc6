"""Store of a job in etcd, mirrored in the memory of each launcher.

Keys below ``PREFIX/``::

    store/KEY    values of the store, and exits of ranks
    lease        the lease of all these keys: launchers keep it alive, the end of the job revokes it
    lock         the first launcher, with its own lease

Writes go to etcd and return when this mirror has seen them, so that a process that has claimed a key sees all earlier
claims. Reads never leave the process. While etcd does not answer, writes wait and reads continue.

A write whose answer was lost may have been carried out, and is repeated: a claim finds its own earlier value, and a
value that is set has one writer. When the lease has ended before the job, the first launcher writes all values again;
other writes wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kfcomm.errors import KfcommError, LocalProtocolError, RendezvousError
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.backends.etcd import Address
from kfcomm.rendezvous.backends.etcd.gateway import FIRST_PAUSE_S, LAST_PAUSE_S, Gateway, NotThere, data, end_of, text
from kfcomm.rendezvous.backends.etcd.leases import (
    BEAT_S,
    KEPT_FOR_S,
    Lease,
    held_by,
    is_kept,
    locked,
    revoke,
    unless_held,
)
from kfcomm.rendezvous.keyvalue import JOB_RECORD, Exit, StoreClosed
from kfcomm.types import override

PAGE = 64
"""Values per request; a value has at most half a MiB."""

_LOG = logging.getLogger("kfcomm.etcd")


class EtcdStore(LocalStore):
    """Store in etcd, mirrored in memory. Made by `begin`."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = gateway
        self._is_first = False
        self._root = gateway.address.prefix.encode() + b"/"
        self._store = self._root + b"store/"
        self._lease = Lease(gateway, self._root + b"lease", self._has_lost_lease, self._is_over)
        self._lock = ""
        self._revision = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def begin(cls, address: Address, *, is_first: bool, within_s: float) -> EtcdStore:
        """Connect to an etcd within this time, and load its values of the job; one launcher ``is_first``.

        Raises:
            RendezvousError: etcd cannot be reached, refuses the user, or another launcher is the first.
        """
        made = cls(Gateway(address))
        try:
            made._lease.has(await made._lease.share(within_s))
            if is_first:
                made._is_first = True
                made._lock = await locked(made._gateway, made._root + b"lock", within_s)
            await made._load(within_s)
        except BaseException:
            await revoke(made._gateway, made._lock)
            await made._gateway.close()
            raise
        made._gateway.is_in_use = True
        loop = asyncio.get_running_loop()
        made._tasks = [loop.create_task(made._follow()), loop.create_task(made._keep_alive())]
        return made

    @override
    async def set(self, key: str, value: bytes) -> None:
        self.contents.check(key, value)
        name = text(self._store + key.encode())
        await self._write("/v3/kv/put", lambda lease: {"key": name, "value": text(value), "lease": lease})

    @override
    async def claim(self, key: str, value: bytes) -> bytes:
        if (held := self.contents.held(key)) is not None:
            return held
        self.contents.check(key, value)
        name = self._store + key.encode()
        answer = await self._write("/v3/kv/txn", lambda lease: unless_held(name, value, lease))
        if answer.get("succeeded"):
            return value
        revision, held = held_by(answer)
        await self._seen(revision)
        return held

    @override
    async def report_exit(self, end: Exit) -> None:
        # at once: no decision depends on which report comes first
        self.contents.report_exit(end)
        name, told = self._store + end.key.encode(), end.to_wire()
        await self._write("/v3/kv/txn", lambda lease: unless_held(name, told, lease))

    @override
    async def clear(self, *folders: str) -> None:
        # the record of the job goes last: until then it is known that there is one
        roots = {key.partition("/")[0] for key, _ in self.contents.items()} - {*folders}
        for root in sorted(roots, key=lambda one: (one == JOB_RECORD, one)):
            folder = self._store + root.encode()
            for first, end in ((folder + b"/", end_of(folder + b"/")), (folder, folder + b"\0")):
                await self._write("/v3/kv/deleterange", _without_lease({"key": text(first), "range_end": text(end)}))
        for key in [key for key, _ in self.contents.items() if key.partition("/")[0] in roots]:
            self.contents.drop(key)  # a repeated deletion, after a lost answer, causes no event

    @override
    async def close(self, *, is_over: bool) -> None:
        # if etcd does not answer, the values end with their lease
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks and is_over:
            await self._lease.say_over()
        if tasks:
            await revoke(self._gateway, *([self._lease.number] if is_over else []), self._lock)
        self._end()
        await self._gateway.close()

    # ---------------------------------------------------------------- writes

    async def _write(self, path: str, fields_with: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
        """Send a change, made for the current lease, and wait until this mirror has seen it."""
        while True:
            lease = await self._lease.wait()
            if self.contents.is_closed:
                raise StoreClosed("the store is closed")
            try:
                answer = await self._gateway.ask(path, fields_with(lease))
                break
            except NotThere:
                self._lease.has_ended(lease)
        has_changed = {"put": True, "txn": answer.get("succeeded"), "deleterange": answer.get("deleted")}
        if has_changed[path.rpartition("/")[2]]:
            await self._seen(int(answer["header"]["revision"]))
        return answer

    async def _seen(self, revision: int) -> None:
        """Wait until this mirror has all changes up to a revision."""
        if self._revision < revision and not self.contents.is_closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((revision, waiter))
            await waiter
        if self.contents.is_closed:
            raise StoreClosed("the store is closed")

    # ---------------------------------------------------------------- reads

    async def _load(self, within_s: float) -> None:
        """Load all values, in the order of their changes."""
        rows: list[Mapping[str, Any]] = []
        first, at = self._root, 0
        while True:
            fields = {
                "key": text(first), "range_end": text(end_of(self._root)), "limit": str(PAGE), "revision": str(at),
            }  # fmt: skip
            answer = await self._gateway.ask("/v3/kv/range", fields, within_s=within_s)
            at = at or int(answer["header"]["revision"])
            rows += answer.get("kvs", ())
            if not answer.get("more"):
                break
            first = data(rows[-1]["key"]) + b"\0"
        found = {data(row["key"]): row for row in rows}
        lease = found.pop(self._root + b"lease", None)
        self._lease.hear(None if lease is None else data(lease.get("value", "")))
        if lease is None:
            return  # all values have ended with it, and are written again
        for gone in [key for key, _ in self.contents.items() if self._store + key.encode() not in found]:
            self.contents.drop(gone)
        for key, row in sorted(found.items(), key=lambda one: int(one[1]["mod_revision"])):
            self._take(key, data(row.get("value", "")))
        self._reached(at)

    async def _follow(self) -> None:
        """Follow all changes, switching members as needed."""
        pause_s = FIRST_PAUSE_S
        while not self.contents.is_closed:
            async for result in self._gateway.watch(self._root, end_of(self._root), self._revision + 1):
                if int(result.get("compact_revision", 0)) > self._revision:
                    # the missed changes are compacted: load everything
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
        ended_at = None  # revision in which the lease ended, and all keys with it: these are written again
        for event in events:  # of several revisions, if this process or etcd was slow
            key = data(event["kv"]["key"])
            is_gone = event.get("type") == "DELETE"
            revision = event["kv"]["mod_revision"]
            if key == self._root + b"lease":
                self._lease.hear(None if is_gone else data(event["kv"].get("value", "")))
                if is_gone:
                    ended_at = revision
            elif is_gone and key.startswith(self._store) and revision != ended_at:
                self.contents.drop(key.removeprefix(self._store).decode())
            elif not is_gone:
                self._take(key, data(event["kv"].get("value", "")))
        if events:
            self._reached(int(events[-1]["kv"]["mod_revision"]))

    def _take(self, key: bytes, value: bytes) -> None:
        if not key.startswith(self._store):
            return
        try:
            self.contents.take(key.removeprefix(self._store).decode(), value)
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

    async def _keep_alive(self) -> None:
        try:
            while not self.contents.is_closed:
                await asyncio.sleep(BEAT_S)
                if self._lock and not await is_kept(self._gateway, self._lock):
                    self._lock = await locked(self._gateway, self._root + b"lock", KEPT_FOR_S)
                await self._lease.keep()
        except KfcommError as error:
            self._is_over(str(error))

    def _has_lost_lease(self) -> None:
        if self._is_first:
            _LOG.warning("%s has ended the lease of the job: all is written anew", self._gateway.address)
            self._tasks.append(asyncio.get_running_loop().create_task(self._renew()))

    async def _renew(self) -> None:
        """Get another lease, and write all values again."""
        while not self.contents.is_closed:
            try:
                lease = await self._lease.share()
                for key, value in list(self.contents.items()):
                    await self._gateway.ask("/v3/kv/txn", unless_held(self._store + key.encode(), value, lease))
            except NotThere:
                continue
            except KfcommError as error:
                self._is_over(str(error))
            else:
                self._lease.has(lease)
            return

    def _is_over(self, why: str) -> None:
        if not self.contents.is_closed and self._tasks:
            _LOG.warning("the store in %s has ended: %s", self._gateway.address, why)
        self._end()

    def _end(self) -> None:
        self.contents.close()
        self._lease.end()
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _without_lease(fields: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any]]:
    return lambda _: fields
