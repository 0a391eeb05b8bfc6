"""World of this process: Horovod's functions take no communicator, since a process has one."""

from __future__ import annotations

import kfcomm.sync
from kfcomm.errors import ConfigError
from kfcomm.sync.communicator import Communicator


class _World:
    comm: Communicator | None = None


_world = _World()


def init() -> None:
    """Join the world of the launcher. May be called again."""
    if _world.comm is None:
        _world.comm = kfcomm.sync.init()


def shutdown() -> None:
    """Leave the world. May be called again."""
    comm, _world.comm = _world.comm, None
    if comm is not None:
        comm.close()


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return _world.comm is not None


def communicator() -> Communicator:
    """The communicator behind these functions: for strategies, statistics and dumps.

    Raises:
        ConfigError: ``init`` was not called.
    """
    if _world.comm is None:
        raise ConfigError("Horovod's functions need a world: call hvd.init() first")
    return _world.comm


def rank() -> int:
    """Rank of this process."""
    return communicator().rank


def size() -> int:
    """Number of ranks."""
    return communicator().size


def local_rank() -> int:
    """Rank of this process on its host."""
    return communicator().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return communicator().local_size
