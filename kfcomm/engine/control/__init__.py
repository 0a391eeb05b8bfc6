"""The control plane: failures, leaving ranks and questions, on a thread of its own that never waits for the data plane.

`ControlThread` is that of a process, `memory.MemoryHub` makes those of a world in one process. The engine sees either
as a `ControlPlane`, which notifies it by `ControlEvents` and queries it by `StatusSource`.
"""

from kfcomm.engine.control.base import Answer, ControlEvents, ControlPlane, StatusSource
from kfcomm.engine.control.thread import ControlThread
from kfcomm.engine.control.world import World, addresses_of

__all__ = [
    "Answer",
    "ControlEvents",
    "ControlPlane",
    "ControlThread",
    "StatusSource",
    "World",
    "addresses_of",
]
