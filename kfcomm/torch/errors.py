"""Errors for programs written with torch: each is also a ``torch.distributed.DistBackendError``."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch.distributed as dist

from kfcomm.errors import CollectiveTimeout, KfcommError


def as_torch(error: KfcommError) -> KfcommError:
    """The same error, which ``except RuntimeError`` and ``except DistBackendError`` catch as well as its own class."""
    kind: Any = type(error)
    if not issubclass(kind, dist.DistBackendError):
        error.__class__ = _both(kind)
        if isinstance(error, CollectiveTimeout):  # the word by which programs for torch know it
            error.args = (f"{error} (the timeout of the call, or of its process group)",)
    return error


@cache
def _both(kind: type[KfcommError]) -> type[KfcommError]:
    base: Any = dist.DistBackendError
    made = type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    return cast("type[KfcommError]", made)
