"""Errors of collectives, raised unchanged by backward passes.

torch's C++ keeps only the text of an error in a future's callback. So a backward pass of ``DistributedDataParallel``
would raise a bare ``RuntimeError`` when a peer has died. Here the error is stored for the waiting thread, and raised
instead.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from kfcomm.errors import KfcommError
from kfcomm.torch.compiling import uncompiled

MAX_KEPT = 16
"""Errors that are kept: a pass raises the first, and each bucket under way has one."""

_kept: deque[KfcommError] = deque(maxlen=MAX_KEPT)
"""Of this process, since torch's backward passes are."""


def keep(error: KfcommError) -> KfcommError:
    """Keep the error of a future, for the pass that waits for it; returns it."""
    _kept.append(error)
    return error


def patch_backward() -> None:
    """Let backward passes raise errors that were kept. May be called again."""
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    if getattr(run, "is_patched", False):
        return

    @uncompiled
    def run_backward(*args: Any, **options: Any) -> Any:
        try:
            return run(*args, **options)
        except RuntimeError as error:
            text = str(error)
            found = next((one for one in _kept if str(one) in text), None)
            if found is None:
                raise
            _kept.clear()
            raise found from None

    run_backward.__dict__["is_patched"] = True
    autograd._engine_run_backward = run_backward
