"""Reduction kernels: one for each op and dtype, in NumPy, on flat host buffers.

Invariants: a kernel works element by element, so that a result does not depend on how a buffer is cut into chunks;
only the sign and payload of a result of two different NaN depend on the processor. Integers wrap around, NaN wins in
``min`` and ``max``, and no overflow or invalid value becomes a Python warning. float16 and bfloat16 are summed and
multiplied in float32 and rounded once, at the end.

Kernels know neither ranks nor chunks, and keep only scratch memory between calls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import checked
from kfcomm.arrays.reduce.halves import HALVES, half_kernel, ordered_kernel
from kfcomm.arrays.reduce.kernels import Kernel, plain_kernel, workspace
from kfcomm.arrays.reduce.ops import REDUCTIONS
from kfcomm.arrays.reduce.wire import Wire, wire_dtype_of, wire_of
from kfcomm.common.arguments import hint
from kfcomm.errors import ConfigError
from kfcomm.types import Op

__all__ = ["Kernel", "Wire", "kernel", "supports", "wire_dtype_of", "wire_of"]


@cache
def kernel(op: Op | str, dtype: np.dtype[Any]) -> Kernel:
    """The kernel for ``op`` on ``dtype``, made once.

    Raises:
        ConfigError: the op is unknown, the dtype is not supported, or the op has no meaning for it; says what works.
    """
    if op not in REDUCTIONS:
        raise ConfigError(f"op {op!r} is unknown; known are {', '.join(Op)}{hint(op, Op)}")
    op, dtype = Op(op), checked(dtype)
    reduction = REDUCTIONS[op]
    refusal = reduction.refuses(op, dtype)
    if refusal is not None:
        raise ConfigError(refusal)
    if dtype.name not in HALVES:
        return plain_kernel(op, dtype)
    return half_kernel(op, dtype) if reduction.is_accumulated else ordered_kernel(op, dtype, workspace())


def supports(op: Op | str, dtype: np.dtype[Any]) -> bool:
    """Whether there is a kernel for ``op`` on ``dtype``."""
    return op in REDUCTIONS and REDUCTIONS[Op(op)].refuses(Op(op), dtype) is None
