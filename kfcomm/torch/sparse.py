"""Sums of sparse tensors: what all ranks have is gathered and added up on each, in the order of the ranks.

As Gloo does it. With n ranks, z entries of a rank and r elements in each: every rank gets n·z·(r elements + indices).
"""

from __future__ import annotations

from typing import Any

import torch

from kfcomm.errors import ConfigError
from kfcomm.torch.ops import meaning_of
from kfcomm.torch.tensors import place, read
from kfcomm.types import Op


def parts(tensor: Any, reduce_op: Any) -> tuple[Any, Any]:
    """Indices and values of a tensor in COO layout, one row for each entry.

    Raises:
        ConfigError: another op than a sum.
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


def add_up(tensor: Any, indices: Any, values: Any) -> None:
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
