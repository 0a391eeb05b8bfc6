"""How torch comes to the backend: it calls `register` by the entry point, and `create` for each process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import ProcessGroup

from kfcomm.errors import ConfigError
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.backend import NAME, Backend, Unmet
from kfcomm.torch.meeting import make_world
from kfcomm.torch.work import forward

DEVICES = ("cpu", "cuda")


def register() -> None:
    """Tell torch of the backend ``kfcomm``; torch does so by itself when it is asked for it. May be called again.

    Raises:
        ConfigError: this torch is too old to have a backend made in Python.
    """
    if not hasattr(TorchBackend, "all_gather_single"):
        raise ConfigError(f"the backend kfcomm needs torch 2.14 or later; this is torch {torch.__version__}")
    forward()
    patch()
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def create(opts: Any, backend_options: Any = None) -> Backend:
    """The backend of one process group; all of its ranks call it.

    The default group makes a world. Groups of its ranks are groups of that world's communicator, which share its links
    and memory; where the default group is another library's, each makes a world of its own. With ``enable_reconfigure``
    there is no world before ``reconfigure`` makes one.

    Raises:
        ConfigError: the settings cannot work.
        RendezvousError: ranks are missing in the end (all named), or do not accept each other.
        CollectiveTimeout: of a group: not all members made it alike.
    """
    if getattr(opts, "enable_reconfigure", False):  # torch 2.15
        return _worlds.unmet(opts)
    return _worlds.backend(
        opts.store, opts.group_rank, opts.group_size, opts.timeout, list(opts.global_ranks_in_group), opts.group_id
    )


def communicator(group: Any = None) -> Communicator:
    """The communicator of a process group (the default one, if none is given): for its strategy, statistics and dumps.

    Raises:
        ConfigError: the group has no backend ``kfcomm``.
    """
    return backend_of(group).communicator


def backend_of(group: Any = None) -> Backend:
    """The backend of a process group.

    Raises:
        ConfigError: it is not ``kfcomm``.
    """
    found = group or dist.group.WORLD
    for device in DEVICES:
        try:
            backend = found._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):
            continue
        if isinstance(backend, Backend):
            return backend
    raise ConfigError("this process group is not one of backend kfcomm")


class Worlds:
    """The backends of this process, and that of torch's default group; implements ``backend.Keeper``.

    torch keeps what is C++ of a backend, and would find nothing of ours in it once Python has let it go.
    """

    def __init__(self) -> None:
        self._default: Backend | None = None
        self._open: set[Backend] = set()

    def backend(
        self, store: Any, rank: int, size: int, timeout: timedelta, members: Sequence[int], name: str
    ) -> Backend:
        """See ``create``; ``members`` is empty for the default group."""
        if members and self._default is not None:
            comm = self._default.communicator.group(members, name)  # its own timeout may be short for that
        else:
            comm = make_world(store, rank, size, timeout)
        return self._made(Backend(comm, store, timeout, self), is_default=not members)

    def unmet(self, opts: Any) -> Backend:
        """A backend whose world is to be made by ``reconfigure``."""
        comm: Any = Unmet(opts.group_rank, opts.group_size)
        return self._made(
            Backend(comm, opts.store, opts.timeout, self), is_default=not list(opts.global_ranks_in_group)
        )

    def keep(self, backend: Backend) -> None:
        """See ``Keeper``."""
        self._open.add(backend)

    def follow(self, backend: Backend, follower: Backend) -> None:
        """See ``Keeper``."""
        self.keep(follower)
        if self._default is backend:
            self._default = follower

    def forget(self, backend: Backend) -> None:
        """See ``Keeper``."""
        self._open.discard(backend)
        if self._default is backend:
            self._default = None

    def _made(self, backend: Backend, *, is_default: bool) -> Backend:
        self.keep(backend)
        if is_default:
            self._default = backend
        return backend


_worlds = Worlds()
"""torch calls a plain function."""


Group: Any = ProcessGroup
GLOO, CUSTOM = Group.BackendType.GLOO, Group.BackendType.CUSTOM


def patch() -> None:
    """Teach torch's class both. May be called again."""
    if getattr(Group.split_group, "is_patched", False):
        return
    split, register, set_default = Group.split_group, Group._register_backend, Group._set_default_backend

    def split_group(self: Any, new_ranks: Any, *args: Any, **options: Any) -> Any:
        if self.rank() not in new_ranks and _is_ours(self):
            return None
        return split(self, new_ranks, *args, **options)

    def register_backend(self: Any, device: Any, kind: Any, backend: Any = None) -> None:
        register(self, device, CUSTOM if isinstance(backend, Backend) else kind, backend)

    def set_default_backend(self: Any, kind: Any) -> None:
        set_default(self, CUSTOM if kind == GLOO and _is_ours(self) else kind)

    split_group.__doc__ = split.__doc__
    split_group.__dict__["is_patched"] = True
    Group.split_group = split_group
    Group._register_backend = register_backend
    Group._set_default_backend = set_default_backend


def _is_ours(group: Any) -> bool:
    """Whether all that a group has registered are backends of ours."""
    devices = group._device_types
    return bool(devices) and all(isinstance(group._get_backend(device), Backend) for device in devices)
