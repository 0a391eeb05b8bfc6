"""Rendezvous of a process group: through torch's store, or by the handles of ``reconfigure``.

Through torch's store: each rank listens, writes its address, and waits for the addresses of the others. Nothing else is
kept there, so the store may end with the process that serves it. The order is *generation, token, addresses*; a group
that is made again over the same store gets the next generation. A process that can reach torch's store can join, unless
``KFCOMM_TOKEN`` is set on all ranks: the store holds no other secret.

By handles: a process that is asked for its handle opens a store of torch, whose address the handle holds, and keeps it
open as long as it lives. All processes that meet use the store of the first, so that only one port has to be reachable
besides those of kfcomm's own links.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.joining import prepare
from kfcomm.rendezvous.authentication import concealed_token, given_token
from kfcomm.rendezvous.host import LOOPBACK, choose_address, store_url
from kfcomm.rendezvous.meeting import ForeignRendezvous
from kfcomm.sync.communicator import Communicator, join


def make_world(store: Any, rank: int, size: int, timeout: timedelta) -> Communicator:
    """Make a world of the ranks that share a store of torch; all of them call it."""
    # The generation: all ranks have made the same number of groups over this store.
    folder = f"kfcomm/{store.add(f'kfcomm/{rank}', 1)}"
    meeting = ForeignRendezvous(
        _TorchStore(store), "torch", "process group", folder, rank, size, timeout.total_seconds()
    )
    if size == 1:
        return join(prepare(rank=0, size=1, timeout=meeting.timeout_s, elastic=False), meeting.exchange)
    url = store_url(*address_of(store))
    token = None
    if given_token(os.environ, None) is None and concealed_token(url) is None:
        # A process that can read it there could also have joined without.
        token = meeting.share(f"{folder}/token", lambda: secrets.token_hex(32))
    local_rank, local_size = _local(size)
    settings = prepare(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, store=url, serve=False, token=token,
        timeout=meeting.timeout_s, elastic=False,
    )  # fmt: skip
    meeting.stall_after_s = settings.stall_after_s
    return join(settings, meeting.exchange)


class _TorchStore(NamedTuple):
    store: Any

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def find(self, key: str) -> bytes | None:
        try:
            return bytes(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError as error:
            raise RendezvousError(f"torch's store does not answer: {error}") from error


def address_of(store: Any) -> tuple[str, int]:
    """Host and port by which the other ranks are reached; this host's for a store in a file, or for None."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return os.environ.get("MASTER_ADDR") or LOOPBACK, 1
    return (LOOPBACK if host == "localhost" else str(host)), int(port)


def _local(size: int) -> tuple[int | None, int | None]:
    """Rank and size on this host from the launcher, which choose the device; None for a world smaller than the job."""
    rank, local_size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if str(size) != os.environ.get("WORLD_SIZE") or not rank.isdigit() or not local_size.isdigit():
        return None, None
    return int(rank), int(local_size)


SCHEME = "kfcomm"
NO_RANK = -1


class ProcessHandle(NamedTuple):
    """Address of a process that can take part in ``reconfigure``."""

    uid: str  # the same in all handles of the process
    host: str  # of its store, as the port
    port: int
    rank: int  # its present one, or `NO_RANK`

    def __str__(self) -> str:
        return "|".join((SCHEME, *map(str, self)))

    @classmethod
    def of(cls, text: str) -> ProcessHandle:
        """Parse the text of a handle."""
        try:
            scheme, uid, host, port, rank = text.split("|")
            if scheme != SCHEME:
                raise ValueError(scheme)
            return cls(uid, host, int(port), int(rank))
        except ValueError:
            raise ConfigError(f"{text[:100]!r} is not a handle of get_reconfigure_handle") from None


class Own:
    """The handle of this process, and its store."""

    def __init__(self) -> None:
        self._uid = self._host = ""
        self._store: Any = None
        self._pid = 0
        self._used: set[int] = set()  # by rendezvous, also by those that failed

    def handle(self, rank: int, towards: tuple[str, int]) -> ProcessHandle:
        """The handle of this process; its interface is that ``towards`` an address, or of ``KFCOMM_INTERFACE``."""
        if self._pid != os.getpid():  # the first, or in a forked child
            self._uid, self._pid, self._used = secrets.token_hex(8), os.getpid(), set()
            self._host = choose_address(os.environ.get("KFCOMM_INTERFACE") or None, towards)
            # Port 0: the system chooses one, and the handle carries it.
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return ProcessHandle(self._uid, self._host, int(self._store.port), rank)

    def meet(self, handles: Collection[str], uuid: int, timeout: timedelta) -> tuple[Any, int]:
        """The store of all these processes for the rendezvous ``uuid``, and the place of this process among them."""
        found = in_order(handles)
        uids = [one.uid for one in found]
        if self._pid != os.getpid() or self._uid not in uids:
            raise ConfigError("the handle of this process is missing: see get_reconfigure_handle")
        if uuid in self._used:
            raise ConfigError(f"the uuid {uuid} was already used by a reconfigure of this process: take a new one")
        self._used.add(uuid)
        place = uids.index(self._uid)
        store = self._store if place == 0 else _reached(found[0], timeout)
        # Keys of an earlier rendezvous, which may have failed halfway, must not be found by this one.
        return dist.PrefixStore(f"reconfigure/{uuid}", store), place


def in_order(handles: Collection[str]) -> list[ProcessHandle]:
    """Handles by rank: in the order of a list; of a set by present ranks, new processes last."""
    found = [ProcessHandle.of(one) for one in handles]
    if not found or len({one.uid for one in found}) < len(found):
        raise ConfigError(f"handles name each process once, and at least one; got {len(found)}")
    if isinstance(handles, list | tuple):
        return found
    return sorted(found, key=lambda one: (one.rank == NO_RANK, one.rank, one.uid))


def _reached(first: ProcessHandle, timeout: timedelta) -> Any:
    try:
        return dist.TCPStore(first.host, first.port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise RendezvousError(f"the process at {first.host}:{first.port} cannot be reached: {error}") from error


own = Own()
"""The one of this process, since a handle names a process and not a group."""
