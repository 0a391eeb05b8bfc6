"""Results of the fake collective backend, and what it refuses: the rules of NCCL. Pure."""

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


class FakeLaunch(NamedTuple):
    """Launch of one rank at one place of its group; the same on all ranks."""

    verb: Verb  # what is done
    op: Op | None  # how, or None
    root: int  # rank in the group, or -1
    dtype: np.dtype[Any]  # of all parts
    sizes: tuple[int, ...]  # elements of each part: ``n`` in the table of `kfcomm.transports.base.Part`

    def __str__(self) -> str:
        op = "" if self.op is None else f" {self.op}"
        root = "" if self.root < 0 else f" with root {self.root}"
        return f"{self.verb}{op} of {' + '.join(map(str, self.sizes))} {self.dtype}{root}"


class Impossible(Exception):
    """A launch that no backend could carry out, in words."""


def supports(verb: Verb, dtype: np.dtype[Any], op: Op | None) -> bool:
    """Whether the fake supports it: as NCCL, it moves any type and reduces numbers, except complex ones."""
    if verb in MOVING:
        return op is None
    is_float = dtype.name in FLOATS
    return verb in REDUCING and op in FOLDS and (is_float or (dtype.name in INTEGERS and op is not Op.AVG))


def num_elements(verb: Verb, part: Part, dtype: np.dtype[Any], is_root: bool, size: int) -> int:
    """The ``n`` of a part."""
    arrays = [x for x in part if x is not None]
    for x in arrays:
        if not isinstance(x, FakeArray) or x.ndim != 1 or not x.is_contiguous or x.dtype != dtype:
            raise Impossible(f"{verb} with {x!r}: expected flat memory of {dtype} on a fake device")
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
    span = source.__kfcomm_kind__.span
    return verb not in IN_PLACE or span(source) != span(target)


def results(launched: FakeLaunch, sources: Sequence[Array]) -> list[Array | None]:
    """Results of one part by rank, from the sources of all ranks."""
    size, root = len(sources), launched.root
    match launched.verb:
        case Verb.REDUCE_SCATTER:
            return list(np.split(_folded(launched.op, sources), size))
        case Verb.ALL_TO_ALL:
            pieces = [np.split(source, size) for source in sources]
            return [np.concatenate([piece[rank] for piece in pieces]) for rank in range(size)]
        case Verb.ALL_REDUCE | Verb.REDUCE:
            whole = _folded(launched.op, sources)
        case Verb.BROADCAST:
            whole = sources[root]
        case _:
            whole = np.concatenate(sources)
    at_root = launched.verb in (Verb.REDUCE, Verb.GATHER)
    return [whole if rank == root or not at_root else None for rank in range(size)]


def _folded(op: Op | None, sources: Sequence[Array]) -> Array:
    # in the order of the ranks, half floats as float32: the same every time and on every rank
    dtype = sources[0].dtype
    is_half = dtype.name in ("float16", "bfloat16")
    wide = [source.astype(np.float32) for source in sources] if is_half else list(sources)
    with np.errstate(all="ignore"):
        total = reduce(FOLDS[op or Op.SUM], wide)
        if op is Op.AVG:
            total = total / total.dtype.type(len(sources))
        folded: Array = total.astype(dtype)
    return folded
