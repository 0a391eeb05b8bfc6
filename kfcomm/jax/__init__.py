"""Collectives of pytrees for programs written with JAX: eager, inside ``jit``, and through ``grad``.

Everything is imported when it is first used, JAX with it.
"""

from typing import TYPE_CHECKING

from kfcomm.common.extras import require
from kfcomm.common.lazy import imported_when_used

require("kfcomm.jax", "jax")

if TYPE_CHECKING:
    from kfcomm.jax import optimizers
    from kfcomm.jax.collectives import all_gather, all_reduce, broadcast
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(
        __name__,
        dict.fromkeys(("all_gather", "all_reduce", "broadcast"), "kfcomm.jax.collectives")
        | {"optimizers": "kfcomm.jax.optimizers"},
    )

__all__ = ["all_gather", "all_reduce", "broadcast", "optimizers"]
