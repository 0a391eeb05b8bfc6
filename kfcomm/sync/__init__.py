"""The verbs of kfcomm for programs without an event loop: blocking, from any thread.

::

    with kfcomm.sync.init() as comm:
        y = comm.all_reduce(x, name="grad/0")
        h = comm.all_reduce_async(x, name="grad/1")
        y = h.wait()

A thin skin over ``kfcomm.Communicator``, which lives on an I/O thread.
"""

from kfcomm.sync.adaptation import Adaptation
from kfcomm.sync.communicator import Communicator, Queue, init
from kfcomm.sync.thread import Handle

__all__ = ["Adaptation", "Communicator", "Handle", "Queue", "init"]
