"""Membership changes of torch's default group: shrinking to the surviving ranks, and reconfiguring to any processes.

``dist.shrink_group`` needs to be told which ranks are lost, and ``dist._reconfigure`` keeps size and ranks; these
functions do not.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from kfcomm.errors import KfcommError
from kfcomm.torch.backend import NAME
from kfcomm.torch.errors import as_torch
from kfcomm.torch.meeting import NO_RANK, address_of, own
from kfcomm.torch.registration import backend_of


def shrink(timeout: float | None = None) -> Any:
    """Shrink torch's default group to the surviving ranks, which need not know the lost ones, and return it.

    All surviving ranks call it, after a ``PeerLost`` or at any time. They agree on the survivors, as in
    ``Communicator.shrink``, and call ``dist.shrink_group`` with the lost ranks, which destroys all other groups of
    torch. If no rank is lost, the group stays.

    Args:
        timeout: seconds to wait for the others; None for the group's.

    Returns:
        The new default process group, with ranks from 0 in the order that they had.

    Raises:
        ConfigError: the default group is not one of backend kfcomm, or was shrunk while the excluded ranks lived.
        CollectiveError: see ``Communicator.shrink``.
    """
    group = dist.group.WORLD
    backend = backend_of(group)
    try:
        excluded = backend.find_lost(timeout)
    except KfcommError as error:
        raise as_torch(error) from None
    return dist.shrink_group(excluded, group) if excluded else group


def get_reconfigure_handle() -> str:
    """The handle by which other processes find this one in ``reconfigure``, in a process group or before one."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank = NO_RANK if group is None else dist.get_rank()
    return str(own.handle(rank, address_of(None if group is None else group.get_group_store())))


def reconfigure(uuid: int, handles: Collection[str], timeout: timedelta | None = None) -> Any:
    """Make these processes torch's default group, whatever groups they were in before; all of them call it.

    Torch's ``dist._reconfigure`` exchanges processes of a group whose size and ranks stay: torch keeps these in C++,
    where a backend made in Python cannot change them. This function makes a new group, so that both may change. All
    groups of this process are destroyed first; calls in flight in them fail.

    Args:
        uuid: the same on all processes, a new one for each call.
        handles: of all processes, from ``get_reconfigure_handle``: a list in the order of the new ranks; a set is
            ordered by present ranks, new processes last.
        timeout: of the new group's collectives, and of the rendezvous; None for torch's default.

    Returns:
        The default process group.

    Raises:
        ConfigError: the handles are not those of several processes, with this one among them.
        RendezvousError: processes are missing at the timeout; names all of them.
    """
    timeout = timeout or default_pg_timeout
    store, rank = own.meet(handles, uuid, timeout)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(NAME, store=store, rank=rank, world_size=len(handles), timeout=timeout)
    return dist.group.WORLD
