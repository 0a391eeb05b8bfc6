"""Named, asynchronous collective communication along graphs you choose.

::

    async with kfcomm.init() as comm:
        y = await comm.all_reduce(x, name="grad/0")

This module owns the public names and nothing else. Importing it needs NumPy, msgpack and, where it exists, uvloop;
no framework, no network and no environment variable is looked at before ``init`` is called.
"""

from kfcomm import adapt, strategies, sync
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.messages import Queue
from kfcomm.communicator import Communicator, init
from kfcomm.dump import dump
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    EpochChanged,
    InternalError,
    KfcommError,
    PeerLost,
    ProtocolError,
    RendezvousError,
    SessionClosed,
    TransportError,
    WouldDeadlock,
)
from kfcomm.monitor import Statistics
from kfcomm.types import Layout, Op
from kfcomm.version import __version__

__all__ = [
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "ConfigError",
    "EpochChanged",
    "Handle",
    "InternalError",
    "KfcommError",
    "Layout",
    "Op",
    "PeerLost",
    "ProtocolError",
    "Queue",
    "RendezvousError",
    "SessionClosed",
    "Statistics",
    "TransportError",
    "WouldDeadlock",
    "__version__",
    "adapt",
    "dump",
    "init",
    "strategies",
    "sync",
]
