"""What torch's own words for a world that changes leave out: ranks that need not be told who has died, other sizes."""

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
    """Torch's default group becomes that of the ranks that live, and is returned; nobody has to know who has died.

    All ranks that live call it, after a ``PeerLost`` or when they like. They agree on who goes on, as in
    ``Communicator.shrink``, and call ``dist.shrink_group`` with the others, which destroys all other groups of torch.
    If nobody is missing, the group stays.

    Args:
        timeout: seconds to wait for the others; None for the group's.

    Returns:
        The default process group from now on, whose ranks are numbered from 0 in the order that they had.

    Raises:
        ConfigError: the default group is not one of backend kfcomm, or was shrunk while those left out lived.
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
    """By which other processes find this one in ``reconfigure``; it may be in no process group yet."""
    group = dist.group.WORLD if dist.is_initialized() else None
    rank = NO_RANK if group is None else dist.get_rank()
    return str(own.handle(rank, address_of(None if group is None else group.get_group_store())))


def reconfigure(uuid: int, handles: Collection[str], timeout: timedelta | None = None) -> Any:
    """These processes become torch's default group, whatever groups they were in before; all of them call it.

    Torch's ``dist._reconfigure`` changes the processes of a group whose number and ranks stay: a backend that is made
    in Python cannot change what torch keeps of these in C++. This makes the group anew, so both may change. All groups
    of this process are destroyed before; what is in flight in them fails.

    Args:
        uuid: another one for each call, the same on all processes.
        handles: of all, as ``get_reconfigure_handle`` gave them: a list has them by rank; of a set those that have
            ranks come first, in their order.
        timeout: of the new group's collectives, and for meeting; None for torch's default.

    Returns:
        The default process group.

    Raises:
        ConfigError: the handles are not those of several processes, with this one among them.
        RendezvousError: processes are missing in the end, all named.
    """
    timeout = timeout or default_pg_timeout
    store, rank = own.meet(handles, uuid, timeout)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(NAME, store=store, rank=rank, world_size=len(handles), timeout=timeout)
    return dist.group.WORLD
