"""Blocking interface of kfcomm, for programs without an event loop; callable from any thread.

::

    with kfcomm.sync.init() as comm:
        y = comm.all_reduce(x, name="grad/0")
        h = comm.all_reduce_async(x, name="grad/1")
        y = h.wait()

An adapter over ``kfcomm.Communicator``: each caller drives the engine itself.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used
from kfcomm.sync.communicator import Communicator, init
from kfcomm.sync.handle import Handle, PersistentCollective
from kfcomm.sync.verbs import Queue

if TYPE_CHECKING:
    from kfcomm.sync.adaptation import Adaptation
    from kfcomm.sync.elastic import Elastic, ElasticCommunicator
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {
            "Adaptation": "kfcomm.sync.adaptation",
            "Elastic": "kfcomm.sync.elastic",
            "ElasticCommunicator": "kfcomm.sync.elastic",
        },
    )

__all__ = [
    "Adaptation", "Communicator", "Elastic", "ElasticCommunicator", "Handle", "PersistentCollective", "Queue", "init",
]  # fmt: skip
