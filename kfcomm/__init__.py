"""Named, asynchronous collective communication along graphs you choose.

::

    async with kfcomm.init() as comm:
        y = await comm.all_reduce(x, name="grad/0")

This module owns the public names and nothing else. What is behind a name is imported when it is first used. No
framework, no network and no environment variable is looked at before ``init`` is called.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used
from kfcomm.common.version import __version__
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    EpochChanged,
    GuardFailed,
    InternalError,
    KfcommError,
    Partitioned,
    PeerLost,
    ProtocolError,
    RendezvousError,
    SessionClosed,
    StepVoid,
    TransportError,
    WouldDeadlock,
)
from kfcomm.types import Layout, Op

if TYPE_CHECKING:
    from kfcomm import adapt, elastic, strategies, sync, train
    from kfcomm.collectives.handle import Handle
    from kfcomm.collectives.messages import Queue
    from kfcomm.collectives.persistent import PersistentCollective
    from kfcomm.joining import init
    from kfcomm.monitor import Statistics
    from kfcomm.monitor.dumps import dump
    from kfcomm.world.communicator import Communicator
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {
            "Communicator": "kfcomm.world.communicator",
            "Handle": "kfcomm.collectives.handle",
            "PersistentCollective": "kfcomm.collectives.persistent",
            "Queue": "kfcomm.collectives.messages",
            "Statistics": "kfcomm.monitor",
            "adapt": "kfcomm.adapt",
            "dump": "kfcomm.monitor.dumps",
            "elastic": "kfcomm.elastic",
            "init": "kfcomm.joining",
            "strategies": "kfcomm.strategies",
            "sync": "kfcomm.sync",
            "train": "kfcomm.train",
        },
    )

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "ConfigError",
    "EpochChanged",
    "GuardFailed",
    "Handle",
    "InternalError",
    "KfcommError",
    "Layout",
    "Op",
    "Partitioned",
    "PeerLost",
    "PersistentCollective",
    "ProtocolError",
    "Queue",
    "RendezvousError",
    "SessionClosed",
    "Statistics",
    "StepVoid",
    "TransportError",
    "WouldDeadlock",
    "__version__",
    "adapt",
    "dump",
    "elastic",
    "init",
    "strategies",
    "sync",
    "train",
]


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return __all__
