"""Training with JAX: collectives of pytrees, eager, inside ``jit`` and through ``grad``, and optimizers.

A name here is imported, and JAX with it, when it is first used.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used, require

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
