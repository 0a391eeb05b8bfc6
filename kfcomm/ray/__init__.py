"""Training with Ray: ``run`` makes workers into ranks, and ``ray.util.collective`` goes over kfcomm.

``run`` starts workers as actors, each with a communicator. ``register`` makes the backend of ``ray.util.collective``
known to a process; Ray needs that in every actor, and on drivers that make groups. Ray Train needs none of it:
``TorchConfig(backend="kfcomm")``. A name here is imported, and Ray with it, when it is first used.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used, require

require("kfcomm.ray", "ray")

if TYPE_CHECKING:
    from kfcomm.ray.group import communicator, register
    from kfcomm.ray.job import run
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        {"communicator": "kfcomm.ray.group", "register": "kfcomm.ray.group", "run": "kfcomm.ray.job"},
    )

__all__ = ["communicator", "register", "run"]
