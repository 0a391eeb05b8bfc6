"""The control plane: news and questions that go around the data, on a thread that always has time.

`ControlThread` is that of a process, `memory.MemoryHub` makes those of a world in one process; `ControlPlane` is what
both are to the engine, which is told by `ControlEvents` and asked by `StatusSource`.
"""

from kfcomm.engine.control.base import Answer, ControlEvents, ControlPlane, StatusSource
from kfcomm.engine.control.thread import ControlThread, World, addresses_of

__all__ = [
    "Answer",
    "ControlEvents",
    "ControlPlane",
    "ControlThread",
    "StatusSource",
    "World",
    "addresses_of",
]
