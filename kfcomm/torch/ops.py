"""Reduce ops of torch in terms of kfcomm's, and sums of sparse tensors.

Sparse tensors are summed as Gloo does it: the entries of all ranks are gathered, and added up on each rank in the order
of the ranks. With n ranks, z entries per rank and r elements per entry, a rank receives n·z·(r elements + indices).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kfcomm.errors import ConfigError
from kfcomm.torch.tensors import place, read
from kfcomm.types import Op

Kind = dist.ReduceOp.RedOpType

OPS = {
    Kind.SUM: Op.SUM,
    Kind.AVG: Op.AVG,
    Kind.PRODUCT: Op.PROD,
    Kind.MIN: Op.MIN,
    Kind.MAX: Op.MAX,
    Kind.BAND: Op.AND,
    Kind.BOR: Op.OR,
    Kind.BXOR: Op.XOR,
    Kind.PREMUL_SUM: Op.SUM,
}
# An enum of C++: two that are equal need not be the same object.
BY_NUMBER = {int(kind): op for kind, op in OPS.items()}
PLAIN_SUM, PREMULTIPLIED = int(Kind.SUM), int(Kind.PREMUL_SUM)
FOR_BOOL = {Op.SUM: Op.OR, Op.PROD: Op.AND, Op.MAX: Op.OR, Op.MIN: Op.AND}
"""A bool cannot hold a count: a sum is true if any summand is."""


class Meaning(NamedTuple):
    """Meaning of a ``ReduceOp``.

    Attributes:
        op: that combines the tensors of the ranks.
        factor: by which each tensor is multiplied first; None for 1.
    """

    op: Op
    factor: Any = None


SUM = Meaning(Op.SUM)


def meaning_of(reduce_op: Any, dtype: Any) -> Meaning:
    """The meaning of a ``ReduceOp`` for tensors of this dtype.

    Raises:
        ConfigError: the op is not supported.
    """
    kind = reduce_op.op if isinstance(reduce_op, dist.ReduceOp) else reduce_op
    number = int(kind)
    if number == PLAIN_SUM and dtype is not torch.bool:
        return SUM
    op = BY_NUMBER.get(number)
    if op is None:
        raise ConfigError(f"op {kind} is not supported; supported are {', '.join(one.name for one in OPS)}")
    if dtype is torch.bool:
        op = FOR_BOOL.get(op, op)
    factor = reduce_op.__getstate__()[1] if number == PREMULTIPLIED else None
    return Meaning(op, factor)


def whole_mean(op: Op, finish: Callable[[], object] | None, tensor: Any, size: int) -> tuple[Op, Any]:
    """Turn an average of integers into a sum and a division by the size, truncated as NCCL does it.

    Args:
        op: of the call; others are returned as they are.
        finish: called before the division.
        tensor: the result's.
        size: number of ranks.
    """
    if op is not Op.AVG or tensor.is_floating_point() or tensor.is_complex():
        return op, finish

    def divide() -> None:
        if finish is not None:
            finish()
        tensor.detach().div_(size, rounding_mode="trunc")

    return Op.SUM, divide


def sparse_parts(tensor: Any, reduce_op: Any) -> tuple[Any, Any]:
    """Indices and values of a tensor in COO layout, one row for each entry.

    Raises:
        ConfigError: the op is not a sum.
    """
    op, factor = meaning_of(reduce_op, tensor.dtype)
    if op is not Op.SUM:
        raise ConfigError(f"sparse tensors can be summed; {op} of them has no meaning here")
    whole = tensor.detach().coalesce()
    entries = whole._nnz()
    values = whole.values() if factor is None else whole.values() * factor
    indices = read(whole.indices().t().contiguous()).reshape(entries, tensor.sparse_dim())
    width = max(1, values[:1].numel()) if entries else _width(tensor)
    return indices, read(values).reshape(entries, width)


def add_up_sparse(tensor: Any, indices: Any, values: Any) -> None:
    """Make ``tensor`` the sum of the entries of all ranks."""
    count = len(indices)
    rows = torch.empty((count, *tensor.shape[tensor.sparse_dim() :]), dtype=tensor.dtype)
    place(rows).array[:] = values.reshape(-1)
    made = torch.sparse_coo_tensor(torch.from_numpy(indices).t(), rows, tensor.shape, check_invariants=True)
    with torch.no_grad():
        tensor.copy_(made.coalesce())


def _width(tensor: Any) -> int:
    width = 1
    for length in tensor.shape[tensor.sparse_dim() :]:
        width *= length
    return width
