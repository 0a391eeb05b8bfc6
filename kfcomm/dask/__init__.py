"""Training with Dask: ``run`` makes one rank of each worker that holds a part of the data.

A name here is imported, and Dask with it, when it is first used.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used, require

require("kfcomm.dask", "distributed")

if TYPE_CHECKING:
    from kfcomm.dask.job import run
else:  # type checkers would take any name for one that is there
    __getattr__ = imported_when_used(__name__, {"run": "kfcomm.dask.job"})

__all__ = ["run"]
