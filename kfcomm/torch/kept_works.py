"""Works for torch before 2.7, which does not keep them, and other differences in how it calls a backend.

Its C++ keeps a part of its own of a work that is made in Python, and waits for ever once Python has freed the rest. So
works for callers in C++ (the reducer, functional collectives) are kept alive here until they are waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from kfcomm.torch.compiling import uncompiled

KEEPS_WORKS = hasattr(AllreduceOptions, "asyncOp")
"""Whether C++ keeps works that are made in Python."""
PLAIN = AllgatherOptions()
"""For calls without options: in older torch those of ``all_gather`` have none."""
VERBS = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv",
    "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods that give a work."""
KEPT: set[Any] = set()
"""Works whose only owner may be C++."""
PYTHON_CALLER = dist.distributed_c10d.__file__

is_async: Callable[[Any], bool] = attrgetter("asyncOp") if KEEPS_WORKS else lambda _: True
"""Whether a caller with these options takes a work; older torch does not tell."""


def with_kept_works(cls: type[Any]) -> type[Any]:
    """The class, or in older torch a subclass that keeps the works of callers in C++."""
    if KEEPS_WORKS:
        return cls
    torch._C._dynamo.eval_frame.skip_code(KEPT_CODE)
    return type(cls.__name__, (cls,), {name: _kept(getattr(cls, name)) for name in VERBS})


def _kept(verb: Callable[..., Any]) -> Callable[..., Any]:
    make = uncompiled(verb)

    def call(*args: Any, **options: Any) -> Any:
        work = make(*args, **options)
        caller = sys._getframe().f_back  # none on autograd's own threads
        if caller is None or caller.f_code.co_filename != PYTHON_CALLER:
            KEPT.add(work)
        return work

    return call


KEPT_CODE = _kept(with_kept_works).__code__


def _above(depth: int) -> FrameType:
    """The frame that calls the backend; where none does, the one so much above the caller's."""
    # In older torch, frames of its compiler lie between.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not KEPT_CODE:
        frame = frame.f_back
    return sys._getframe(depth + 1) if frame is None else frame.f_back or frame


above: Callable[[int], FrameType] = sys._getframe if KEEPS_WORKS else _above
"""The frame so much above the caller's, which calls the backend."""
