"""Training with Ray: ``ray.util.collective`` over kfcomm.

``register()`` makes the backend known to a process; Ray needs that in every actor, and on drivers that make groups.
Ray Train needs none of it: ``TorchConfig(backend="kfcomm")``. A name here is imported, and Ray with it, when it is
first used.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used, require

require("kfcomm.ray", "ray")

if TYPE_CHECKING:
    from kfcomm.ray.group import communicator, register
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(__name__, dict.fromkeys(("communicator", "register"), "kfcomm.ray.group"))

__all__ = ["communicator", "register"]
