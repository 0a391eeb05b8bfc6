"""Registration with torch, and membership changes of its default group.

`register` is the entry point, and `create` makes the backend of each process group.

``ProcessGroup`` makes two assumptions that a backend made in Python breaks, and each would end the process. `patch`
corrects them in torch's class:

- ``split_group`` asks the backend of every rank, and expects none from a rank in no part. From Python None cannot be
  returned: torch looks for the object in it (2.15, ``PyBackend::initSlotAndCast``).
- ``dist.shrink_group`` registers every smaller group of the CPU as one of Gloo, and DDP's logger then takes its backend
  for Gloo's (2.15, ``_create_shrunk_process_group``).

Groups of other libraries, and groups with a backend of another library, are left to torch.

``dist.shrink_group`` needs to be told which ranks are lost, and ``dist._reconfigure`` keeps size and ranks; `shrink`
and `reconfigure` do not.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.constants import default_pg_timeout

from kfcomm.errors import ConfigError, KfcommError
from kfcomm.rendezvous.torch_groups import why_too_old
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.backend import KfcommBackend, Unmet, new_backend
from kfcomm.torch.bases import DEVICES, IS_GROUP, NAME, make_known, patch_groups
from kfcomm.torch.c10d import as_torch, forward
from kfcomm.torch.failures import patch_backward
from kfcomm.torch.meeting import NO_RANK, address_of, make_world, own


def register() -> None:
    """Register the backend ``kfcomm``, as torch itself does when the backend is asked for. May be called again.

    Raises:
        ConfigError: this torch is too old, with the first version that will do.
    """
    if why := why_too_old(torch.__version__):
        raise ConfigError(f"{why}; this is torch {torch.__version__}")
    patch_backward()
    if IS_GROUP:
        patch_groups()
    else:
        forward()
        patch()
    make_known(create)


def create(opts: Any, backend_options: Any = None) -> KfcommBackend:
    """The backend of one process group; all of its ranks call it."""
    return backend_options if isinstance(backend_options, KfcommBackend) else _worlds.backend(opts)


def communicator(group: Any = None) -> Communicator:
    """The communicator of a process group (the default one, if none is given): for its strategy, statistics and dumps.

    Raises:
        ConfigError: the group has no backend ``kfcomm``.
    """
    return backend_of(group).communicator


def backend_of(group: Any = None) -> KfcommBackend:
    """The backend of a process group."""
    found = group or dist.group.WORLD
    for device in DEVICES:
        try:
            backend = found._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):
            continue
        if isinstance(backend, KfcommBackend):
            return backend
    raise ConfigError("this process group is not one of backend kfcomm")


class Worlds:
    """The open backends of this process, and that of torch's default group."""

    def __init__(self) -> None:
        self._default: KfcommBackend | None = None
        # Kept alive: torch holds only the C++ part of a backend, which is useless once Python has freed it.
        self._open: set[KfcommBackend] = set()

    def backend(self, opts: Any) -> KfcommBackend:
        """Make the backend of a group, as torch describes it."""
        members = list(opts.global_ranks_in_group)  # none: the default group
        comm: Any
        if getattr(opts, "enable_reconfigure", False):  # torch 2.15: it gets a world by ``reconfigure``
            comm = Unmet(opts.group_rank, opts.group_size)
        elif members and self._default is not None:
            # A group of the world's communicator: it shares links and memory, and needs no rendezvous. If the default
            # group is of another library, each group makes a world of its own.
            comm = self._default.communicator.group(members, opts.group_id)  # its own timeout may be short for that
        else:
            comm = make_world(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        made = new_backend(comm, opts.store, opts.timeout, self)
        self.keep(made)
        if not members:
            self._default = made
        return made

    def keep(self, backend: KfcommBackend) -> None:
        """Keep an open backend."""
        self._open.add(backend)

    def follow(self, backend: KfcommBackend, follower: KfcommBackend) -> None:
        """Keep ``follower``, and make it the default if ``backend`` is."""
        self.keep(follower)
        if self._default is backend:
            self._default = follower

    def forget(self, backend: KfcommBackend) -> None:
        """Drop a closed backend."""
        self._open.discard(backend)
        if self._default is backend:
            self._default = None


_worlds = Worlds()
"""Of this process: torch calls a plain function to make a backend."""


Group: Any = ProcessGroup
GLOO, CUSTOM = Group.BackendType.GLOO, Group.BackendType.CUSTOM


def patch() -> None:
    """Correct both in torch's class. May be called again."""
    if getattr(Group.split_group, "is_patched", False):
        return
    split, register, set_default = Group.split_group, Group._register_backend, Group._set_default_backend

    def split_group(self: Any, new_ranks: Any, *args: Any, **options: Any) -> Any:
        if self.rank() not in new_ranks and _is_ours(self):
            return None
        return split(self, new_ranks, *args, **options)

    def register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> None:
        register(self, device, CUSTOM if isinstance(backend, KfcommBackend) else kind, backend)

    def set_default_backend(self: Any, kind: Any) -> None:
        set_default(self, CUSTOM if kind == GLOO and _is_ours(self) else kind)

    split_group.__doc__ = split.__doc__
    split_group.__dict__["is_patched"] = True
    Group.split_group = split_group
    Group._register_backend = register_backend
    Group._set_default_backend = set_default_backend


def _is_ours(group: Any) -> bool:
    """Whether all registered backends of a group are ours."""
    devices = group._device_types
    return bool(devices) and all(isinstance(group._get_backend(device), KfcommBackend) for device in devices)


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
    if not excluded:
        return group
    if hasattr(dist, "shrink_group"):
        return dist.shrink_group(excluded, group)
    made: Any = backend.shrink(excluded)  # an older torch
    return _begun_anew(made.get_group_store(), made.rank(), made.size(), made.options._timeout, made)


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
        uuid: the same on all processes, a new one for each call, also after one that failed.
        handles: of all processes, from ``get_reconfigure_handle``: a list in the order of the new ranks; a set is
            ordered by present ranks, new processes last.
        timeout: of the new group's collectives, and of the rendezvous; None for torch's default.

    Returns:
        The default process group.

    Raises:
        ConfigError: the handles are not those of several processes, with this one among them; the uuid was used before.
        RendezvousError: processes are missing at the timeout; names all of them.
    """
    timeout = timeout or default_pg_timeout
    store, rank = own.meet(handles, uuid, timeout)
    return _begun_anew(store, rank, len(handles), timeout)


def _begun_anew(store: Any, rank: int, size: int, timeout: timedelta, made: Any = None) -> Any:
    """A new default group of torch in the place of all of its groups, with the backend that is ``made``, if one is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=made)
    return dist.group.WORLD
