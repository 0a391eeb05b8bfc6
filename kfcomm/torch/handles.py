"""Handles by which processes meet anew that share no store: those of torch's ``reconfigure``.

A process that is asked for one opens a store of torch's, where the others will find it; a handle says where that is.
It stays open as long as the process lives. All that meet use the store of the first, so that one port of one of them
has to be reached, besides those of kfcomm's own links.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.interfaces import choose_address

SCHEME = "kfcomm"
NO_RANK = -1


class Handle(NamedTuple):
    """Where a process can be met.

    Attributes:
        uid: of the process, the same in all handles that it gives.
        host, port: of its store.
        rank: that it has; -1 without one.
    """

    uid: str
    host: str
    port: int
    rank: int

    def __str__(self) -> str:
        return "|".join((SCHEME, *map(str, self)))

    @classmethod
    def of(cls, text: str) -> Handle:
        """The handle that a process gave.

        Raises:
            ConfigError: none of this backend.
        """
        try:
            scheme, uid, host, port, rank = text.split("|")
            if scheme != SCHEME:
                raise ValueError(scheme)
            return cls(uid, host, int(port), int(rank))
        except ValueError:
            raise ConfigError(f"{text[:100]!r} is no handle of backend kfcomm: see get_reconfigure_handle") from None


class Own:
    """The handle of this process, and its store."""

    def __init__(self) -> None:
        self._uid = self._host = ""
        self._store: Any = None
        self._pid = 0

    def handle(self, rank: int, towards: tuple[str, int]) -> Handle:
        """What the others need.

        Args:
            rank: of this process now.
            towards: host and port by which the interface is chosen, if ``KFCOMM_INTERFACE`` does not name one.
        """
        if self._pid != os.getpid():  # the first, or in a forked child
            self._uid, self._pid = secrets.token_hex(8), os.getpid()
            self._host = choose_address(os.environ.get("KFCOMM_INTERFACE") or None, towards)
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return Handle(self._uid, self._host, int(self._store.port), rank)

    def meet(self, handles: Collection[str], uuid: int, timeout: timedelta) -> tuple[Any, int]:
        """The store of all these processes for this meeting, and the place of this one among them.

        Args:
            handles: in the order of ranks; those of a set are ordered by the ranks that they have, new ones last.
            uuid: the same on all, another one for each meeting.
            timeout: for reaching the store.

        Raises:
            ConfigError: this process gave none of them, or one is given twice.
            RendezvousError: the first one's store cannot be reached.
        """
        found = in_order(handles)
        uids = [one.uid for one in found]
        if self._pid != os.getpid() or self._uid not in uids:
            raise ConfigError("this process has given none of these handles: see get_reconfigure_handle")
        place = uids.index(self._uid)
        store = self._store if place == 0 else _reached(found[0], timeout)
        return dist.PrefixStore(f"reconfigure/{uuid}", store), place


def in_order(handles: Collection[str]) -> list[Handle]:
    """Handles by rank: as listed; those of a set by the ranks that they have, new processes after them.

    Raises:
        ConfigError: there is none, one is none of this backend, or a process is named twice.
    """
    found = [Handle.of(one) for one in handles]
    if not found or len({one.uid for one in found}) < len(found):
        raise ConfigError(f"handles name each process once, and at least one; got {len(found)}")
    if isinstance(handles, list | tuple):
        return found
    return sorted(found, key=lambda one: (one.rank == NO_RANK, one.rank, one.uid))


def _reached(first: Handle, timeout: timedelta) -> Any:
    try:
        return dist.TCPStore(first.host, first.port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise RendezvousError(f"the process at {first.host}:{first.port} cannot be reached: {error}") from error


own = Own()
"""Of this process: handles name processes."""
