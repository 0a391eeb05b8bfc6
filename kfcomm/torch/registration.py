"""How torch comes to the backend: it calls `register` by the entry point, and `create` for each process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend

from kfcomm.errors import ConfigError
from kfcomm.sync.communicator import Communicator
from kfcomm.torch.backend import NAME, Backend
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
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def create(opts: Any, backend_options: Any = None) -> Backend:
    """The backend of one process group; all of its ranks call it.

    The default group makes a world. Groups of its ranks are groups of that world's communicator, which share its links
    and memory; where the default group is another library's, each makes a world of its own.

    Raises:
        ConfigError: the settings cannot work.
        RendezvousError: ranks are missing in the end (all named), or do not accept each other.
        CollectiveTimeout: of a group: not all members made it alike.
    """
    return _worlds.backend(
        opts.store, opts.group_rank, opts.group_size, opts.timeout, list(opts.global_ranks_in_group), opts.group_id
    )


def communicator(group: Any = None) -> Communicator:
    """The communicator of a process group (the default one, if none is given): for its strategy, statistics and dumps.

    Raises:
        ConfigError: the group has no backend ``kfcomm``.
    """
    found = group or dist.group.WORLD
    for device in DEVICES:
        try:
            backend = found._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):
            continue
        if isinstance(backend, Backend):
            return backend.communicator
    raise ConfigError("this process group is not one of backend kfcomm")


class Worlds:
    """The backends of this process, and the world of torch's default group.

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
        made = Backend(comm, store, timeout, self._forget)
        self._open.add(made)
        if not members:
            self._default = made
        return made

    def _forget(self, backend: Backend) -> None:
        self._open.discard(backend)
        if self._default is backend:
            self._default = None


_worlds = Worlds()
"""torch calls a plain function."""
