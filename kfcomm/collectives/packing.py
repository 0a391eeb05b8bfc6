"""``all_reduce_many``: many arrays in few collectives, by a plan that every rank derives alone.

The names are sorted. Small arrays of one dtype are laid one after the other and travel as one; large ones travel by
themselves, uncopied. Each of these *units* has a key made of the first name, and a signature that holds a digest of all
names and shapes: ranks that pack differently get ``CollectiveMismatch``. The first unit takes the next sequence number
of its key, and the others take the same, so that a call which fails on one rank leaves all ranks in step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import HostArray
from kfcomm.arrays.on_device import DeviceArray
from kfcomm.collectives.group import Group
from kfcomm.collectives.handle import Handle, join
from kfcomm.collectives.plans import Plan, Plans

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

PACK_NBYTES = 1 << 16
"""Arrays up to this size are packed: copied twice, which costs less than a collective of their own."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What travels as one.

    Attributes:
        names: of the arrays in it.
        arrays: one large one, or any number of small ones of one dtype.
    """

    names: tuple[str, ...]
    arrays: tuple[HostArray, ...]

    def source(self) -> Array:
        """All elements in a row; the caller's memory if there is one array."""
        return self.arrays[0].flat if len(self.arrays) == 1 else np.concatenate([one.flat for one in self.arrays])

    def results(self, flat: Array) -> dict[str, Any]:
        """The results by name, of the callers' kinds; they share the memory of ``flat``."""
        found: dict[str, Any] = {}
        at = 0
        for name, array in zip(self.names, self.arrays, strict=True):
            end = at + array.flat.size
            found[name] = array.restore(flat[at:end])
            at = end
        return found


def many_key(names: Sequence[str], number: int = 0) -> str:
    """The key of a unit of these names, which are sorted."""
    return f"{names[0]}\0many {number}" if number else f"{names[0]}\0many"


def units_of(names: Sequence[str], arrays: Sequence[HostArray]) -> list[Unit]:
    """The units, the same on every rank: small ones by dtype, then large ones by name."""
    small: dict[np.dtype[Any], tuple[list[str], list[HostArray]]] = {}
    large = []
    for name, array in zip(names, arrays, strict=True):
        flat = array.flat
        if flat.nbytes > PACK_NBYTES:
            large.append(Unit((name,), (array,)))
            continue
        packed = small.get(flat.dtype)
        if packed is None:
            packed = small[flat.dtype] = ([], [])
        packed[0].append(name)
        packed[1].append(array)
    dtypes = sorted(small, key=lambda dtype: dtype.str + dtype.name)
    return [*(Unit(tuple(small[dtype][0]), tuple(small[dtype][1])) for dtype in dtypes), *large]


def digest_of(names: Sequence[str], arrays: Sequence[HostArray | DeviceArray]) -> tuple[int, bytes]:
    """What all ranks must agree on besides dtypes: how many arrays, and a digest of their names and shapes."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8)
    digest.update(repr([array.shape for array in arrays]).encode())
    return len(names), digest.digest()


def post_units(
    group: Group, names: Sequence[str], arrays: Sequence[HostArray], plan: Callable[[Plans, Unit, str], Plan],
    whole: Handle[dict[str, Any]], order: Mapping[str, Any], *, timeout_s: float | None, priority: int,
) -> None:  # fmt: skip
    """Begin all units; ``whole`` gets the results in the ``order`` of the caller's mapping.

    If one fails, the others are given up, and its error is raised once all have ended.
    """
    told = digest_of(names, arrays)
    units = units_of(names, arrays)
    handles: list[Handle[Any]] = []
    seq = None
    try:
        for number, unit in enumerate(units):
            handle: Handle[Any] = Handle(loop=group.engine.loop)
            key = many_key(names, number)
            made = plan(group.plans, unit, key)
            made = replace(made, signature=made.signature._replace(counts=told))
            result = np.empty(made.result_count, made.dtype)
            group.post(
                made, key, source=unit.source(), result=result, value=result, timeout_s=timeout_s, priority=priority,
                handle=handle, seq=seq,
            )  # fmt: skip
            seq = whole.seq = handle.seq
            handles.append(handle)
    except Exception as error:  # noqa: BLE001  no memory, perhaps: the other ranks are told by the first unit
        if not handles:
            whole.seq = group.refuse_now(many_key(names), error)
        for handle in handles:
            handle.cancel()
        whole.set_exception(error)
        return

    def results() -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(order)
        for unit, handle in zip(units, handles, strict=True):
            found.update(unit.results(handle.result()))
        return found

    join(group.engine.reactor, handles, whole, results)
