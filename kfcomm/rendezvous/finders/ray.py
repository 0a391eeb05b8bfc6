"""Tasks and actors of Ray: they have no ranks of their own, and variables that they see are those of Ray's nodes."""

from __future__ import annotations

import sys

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.worlds import Absent, Environ, Outcome


def find(environ: Environ) -> Outcome:
    """Refuse to guess inside a task or an actor. Ray Train sets torchrun's variables, which come first."""
    ray = sys.modules["ray"]
    if not hasattr(ray, "get_runtime_context"):
        return Absent("the module ray is not Ray's")
    if not ray.is_initialized():
        return Absent("Ray is imported and not connected")
    context = ray.get_runtime_context()
    if context.get_actor_id() is None and context.get_task_id() is None:
        return Absent("this process is Ray's driver, not a task or an actor")
    raise ConfigError(
        "Ray: a task or an actor has no rank: use kfcomm.ray.run, kfcomm.ray's collective groups or Ray Train, or pass "
        "rank, size and store; for a world of one, pass size=1"
    )
