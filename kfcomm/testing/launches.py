"""Launches of a fake backend: checks, descriptions and results.

Invariants: results are folded in the order of the ranks, half floats as float32, so that they are the same every
time and on every rank.

This module must not know when anything happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays.devices import Array
from kfcomm.arrays.reduce.ops import REDUCTIONS
from kfcomm.testing.device_arrays import FakeArray
from kfcomm.transports.base import Part
from kfcomm.types import Op, Verb

REDUCING = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.REDUCE_SCATTER)
ROOTED = (Verb.REDUCE, Verb.BROADCAST, Verb.GATHER)
MOVING = (Verb.BROADCAST, Verb.ALL_GATHER, Verb.GATHER, Verb.ALL_TO_ALL)
IN_PLACE = (Verb.ALL_REDUCE, Verb.REDUCE, Verb.BROADCAST)
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FOLDS = {op: reduction.ufunc for op, reduction in REDUCTIONS.items() if reduction.nccl is not None}


class Launched(NamedTuple):
    """Launch of one rank at one place of its group; the same on all ranks.

    Attributes:
        verb: what is done.
        op: how, or None.
        root: rank in the group, or -1.
        dtype: of all parts.
        sizes: elements of each part: ``n`` in the table of `kfcomm.transports.base.Part`.
    """

    verb: Verb
    op: Op | None
    root: int
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        op = "" if self.op is None else f" {self.op}"
        root = "" if self.root < 0 else f" with root {self.root}"
        return f"{self.verb}{op} of {' + '.join(map(str, self.sizes))} {self.dtype}{root}"


class Impossible(Exception):
    """A launch that no backend could carry out, in words."""


def supports(verb: Verb, dtype: np.dtype[Any], op: Op | None) -> bool:
    """As NCCL, but for complex numbers: it moves anything, and reduces numbers."""
    if verb in MOVING:
        return op is None
    is_float = dtype.name in FLOATS
    return verb in REDUCING and op in FOLDS and (is_float or (dtype.name in INTEGERS and op is not Op.AVG))


def checked(verb: Verb, parts: Sequence[Part], op: Op | None, root: int, rank: int, size: int) -> Launched:
    """Check and describe a launch of one rank of a group.

    Raises:
        Impossible: not what `kfcomm.transports.base` says that it has to be.
    """
    if not parts:
        raise Impossible(f"{verb} of no part")
    if (0 <= root < size) != (verb in ROOTED) or (root != -1 and verb not in ROOTED):
        raise Impossible(f"{verb} with root {root} in a group of {size}")
    dtype: np.dtype[Any] = parts[0].source.dtype
    if not supports(verb, dtype, op):
        raise Impossible(f"{verb} of {dtype} with op {op}, which is not supported")
    sizes = [_size(verb, part, dtype, rank == root, size) for part in parts]
    return Launched(verb, op, root, dtype, tuple(sizes))


def _size(verb: Verb, part: Part, dtype: np.dtype[Any], is_root: bool, size: int) -> int:
    """The ``n`` of a part."""
    arrays = [x for x in part if x is not None]
    for x in arrays:
        if not isinstance(x, FakeArray) or x.ndim != 1 or not x.is_contiguous or x.dtype != dtype:
            raise Impossible(f"{verb} with {x!r}, which is no flat memory of {dtype} on a fake device")
    num_in, num_out = _multiples(verb, size)
    source: FakeArray = part.source
    target: FakeArray | None = part.target
    has_target = is_root or verb not in (Verb.REDUCE, Verb.GATHER)
    if has_target != (target is not None):
        raise Impossible(f"{verb} {'without' if has_target else 'with'} memory for a result, root or not: {is_root}")
    if verb is Verb.BROADCAST and not is_root:
        return 0 if target is None else target.size
    count = source.size // num_in
    if source.size != count * num_in or (target is not None and target.size != count * num_out):
        raise Impossible(f"{verb} of {source.size} elements into {target and target.size}, in a group of {size}")
    if target is not None and _overlap(verb, source, target):
        raise Impossible(f"{verb} into memory that overlaps that of its source")
    return count


def _multiples(verb: Verb, size: int) -> tuple[int, int]:
    """Elements of the source and of the result for each ``n``."""
    num_in = size if verb in (Verb.REDUCE_SCATTER, Verb.ALL_TO_ALL) else 1
    num_out = size if verb in (Verb.ALL_GATHER, Verb.GATHER, Verb.ALL_TO_ALL) else 1
    return num_in, num_out


def _overlap(verb: Verb, source: FakeArray, target: FakeArray) -> bool:
    if not np.may_share_memory(source.memory, target.memory):
        return False
    return not (verb in IN_PLACE and is_same(source, target))


def is_same(source: FakeArray, target: FakeArray) -> bool:
    """Whether two flat arrays of one size are the same memory."""
    return source.__kfcomm_kind__.span(source) == target.__kfcomm_kind__.span(target)


def results(launched: Launched, sources: Sequence[Array]) -> list[Array | None]:
    """Results of one part by rank, from the sources of all ranks."""
    size = len(sources)
    match launched.verb:
        case Verb.ALL_REDUCE:
            return [_folded(launched.op, sources)] * size
        case Verb.REDUCE:
            return _only(launched.root, size, _folded(launched.op, sources))
        case Verb.BROADCAST:
            return [sources[launched.root]] * size
        case Verb.GATHER:
            return _only(launched.root, size, np.concatenate(sources))
        case Verb.REDUCE_SCATTER:
            return list(np.split(_folded(launched.op, sources), size))
        case Verb.ALL_TO_ALL:
            pieces = [np.split(source, size) for source in sources]
            return [np.concatenate([piece[rank] for piece in pieces]) for rank in range(size)]
    return [np.concatenate(sources)] * size


def _only(root: int, size: int, result: Array) -> list[Array | None]:
    return [result if rank == root else None for rank in range(size)]


def _folded(op: Op | None, sources: Sequence[Array]) -> Array:
    dtype = sources[0].dtype
    is_half = dtype.name in ("float16", "bfloat16")
    wide = [source.astype(np.float32) for source in sources] if is_half else list(sources)
    with np.errstate(all="ignore"):
        total = reduce(FOLDS[op or Op.SUM], wide)
        if op is Op.AVG:
            total = total / total.dtype.type(len(sources))
        folded: Array = total.astype(dtype)
    return folded
