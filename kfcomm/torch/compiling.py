"""Functions that torch's compiler leaves alone.

``torch.compile`` sees each Python frame that runs while a compiled function is on the stack. These include hooks,
works, the verbs of a process group, and their callees. It would compile dozens of our frames, and fail on some of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorator: the compiler runs the function and its callees as they are."""
    # Without ``torch.compiler.disable``, which imports the compiler (some seconds) and costs 1 µs in each call.
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):  # before torch 2.7
        return cast("F", torch._disable_dynamo(function))
    skip = frames._FrameAction.SKIP
    code = cast("Any", function).__code__
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    # For a function that is compiled itself, and would inline this one.
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg="kfcomm communicates here")
    return function


C = TypeVar("C", bound=type[Any])


def uncompiled_methods(cls: C) -> C:
    """Decorator: `uncompiled` for all methods that the class itself has."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType):
            setattr(cls, name, uncompiled(method))
    return cls


def has_compiled() -> bool:
    """Whether torch's compiler has compiled anything in this process."""
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    return compiler is not None and compiler.FRAME_COUNTER > 0
