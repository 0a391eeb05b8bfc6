"""Verbs of the blocking communicator, derived from those of the asyncio one.

Type checkers, editors and the reference pages read ``verbs.pyi``, which ``python -m tests.sync.stub`` writes.
"""

from kfcomm.collectives.messages import Queue as AsyncQueue
from kfcomm.sync.adapter import Adapter, derive, forward
from kfcomm.world.communicator import Communicator as Async


class BlockingVerbs(Adapter[Async]):
    """Blocking forms of the verbs of ``kfcomm.Communicator``."""


class Queue(Adapter[AsyncQueue]):
    """One end of an ordered, bounded queue of arrays between two ranks; see ``Communicator.queue``."""


derive(BlockingVerbs, Async, by_hand=("close", "group", "request", "shrink", "split"))
forward(BlockingVerbs, Async, "dump", "empty", "set_timeout", "statistics")
derive(Queue, AsyncQueue)
