"""Conversion of values that differ between ranks: when the ranks change, on entering, and for checkpoints.

First all ranks that have the state *collect*: they compare the forms of what differs, and one ``all_reduce`` sums it.
Both calls survive losses, with one result and one list of contributors on all surviving ranks. Nothing is written
before the sums are known, so that ranks which lose another one meanwhile repeat it, or continue with what that one has
contributed: all of them do the same. Then each rank *loads* the sums, divided by the number of ranks that had a value
(mean), or by the new number of ranks (sum). Ranks that leave take part in the first, not in the second.

A value is summed in float64, or complex128, and rounded to its own dtype at the end. All ranks load the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import HostArray, adapt, dtype_of
from kfcomm.core.collective import OWN_NAMES
from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.checks import sendable, shown, unreadable
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.snapshots import Kept, Snapshot, set_parts
from kfcomm.elastic.state import State, may_differ
from kfcomm.elastic.trees import Array, described, is_number, leaves, rebuilt
from kfcomm.errors import ConfigError

SUMS = f"{OWN_NAMES}parts"
"""Name of the ``all_reduce`` of the values that differ."""


class MergedPart(NamedTuple):
    """Value that differs between ranks, on one rank; msgpack can carry it."""

    place: list[Any]  # number of the copy of the state, 0 for the state itself; name; key in the state of an object
    how: str  # one of ``WAYS``
    tree: Any  # see ``described``, with numbers as arrays
    plan: list[list[Any]]  # path, shape and dtype of each array
    others: list[Any]  # bytes of each array that is not converted, else None

    @property
    def title(self) -> str:
        """Name, and key, for error texts."""
        return str(self.place[1]) + "".join(f"[{key!r}]" for key in self.place[2:])


class Conversion(NamedTuple):
    """Sums over the ranks, the same on all of them."""

    parts: list[MergedPart]
    sums: Array  # of all converted arrays, one after the other
    counts: list[int]  # number of ranks that had each array

    def values(self, size: int) -> Iterator[tuple[int, tuple[Any, ...], Any]]:
        """Yield number of the copy, name (and key) and value of each part, for this number of ranks."""
        counts, begin = iter(self.counts), 0
        for part in self.parts:
            arrays = []
            for (_, shape, name), other in zip(part.plan, part.others, strict=True):
                count, dtype = next(counts), dtype_of(name)
                if other is not None:
                    arrays.append(np.frombuffer(other, dtype).reshape(shape).copy())
                    continue
                end = begin + _width(shape, dtype)
                total = self.sums[begin:end] / (count if part.how == "mean" else size)
                arrays.append(
                    total.view(np.complex128 if dtype.kind == "c" else np.float64).astype(dtype).reshape(shape)
                )
                begin = end
            yield part.place[0], tuple(part.place[1:]), rebuilt(part.tree, iter(arrays))


class Merging:
    """Conversion of one rank's state, and of the copies of it that are kept, while an ``Elastic`` is open."""

    def __init__(self, calls: Dispatcher, state: State) -> None:
        self.may_differ = may_differ(state)  # the same on all ranks, which have compared their states on entering
        self.uids: Uids = ()  # ranks of the step for which values were converted
        self.copies: list[Kept] = []  # at most one
        self.merged: Conversion | None = None  # for a checkpoint at this boundary
        self._calls = calls
        self._state = state

    def keep(self, place: Any) -> None:
        """Copy the state, with the positions of samplers."""
        if not self.copies:
            self.copies.append(Kept(self._state))
        self.copies[0].keep(place)

    def roll_back(self) -> Any:
        """Return to the copy; returns the positions of samplers that were kept with it."""
        self.copies[0].restore()
        return self.copies[0].place

    def is_due(self, uids: Uids) -> bool:
        """Whether the ranks have changed since the last conversion."""
        return self.may_differ and uids != self.uids

    async def convert(self, uids: Uids) -> None:
        """Convert for the ranks of the next step, those of them that survive; all call it."""
        merged, contributors = await self._collected()
        self._load(merged, len(contributors))
        self.uids = uids  # if another one was lost, the step after that has other ranks, and values are converted again

    async def collect(self) -> Conversion | None:
        """Collect, before the ranks change; all ranks call it. None if nothing may differ."""
        return (await self._collected())[0] if self.may_differ else None

    @property
    def is_ready(self) -> bool:
        """Whether a checkpoint can be written at this boundary."""
        return self.merged is not None or not self.may_differ

    async def collect_for_checkpoint(self) -> None:
        """Collect for a checkpoint at this boundary; all ranks call it."""
        self.merged = await self.collect()

    def load(self, merged: Conversion | None, uids: Uids) -> None:
        """Load what was collected, for these ranks."""
        if merged is not None:
            self._load(merged, len(uids))
        self.uids = uids

    def split(self) -> None:
        """Convert for the present ranks the values of a checkpoint, which all of them hold: those of one rank."""
        if self.may_differ:
            self._load(self.alone(), len(self.uids))

    def alone(self) -> Conversion:
        """Return what this rank would collect if there were no other."""
        mine, views = _parts_of(self._values())
        return _merged([mine], [True], _buffer(mine, mine, views))

    async def _collected(self) -> tuple[Conversion, Uids]:
        while True:
            mine, views, fault = self._told()
            rows, uids = await self._calls.gather([mine, fault], "forms")
            for rank, (_, why) in enumerate(rows):
                if why is not None:
                    raise ConfigError(f"rank {rank}: {why}")
            said = [[MergedPart(*one) for one in parts] for parts, _ in rows]
            sums, contributors = _buffer(_forms(said), mine, views), uids
            if sums.size:
                handle = self._calls.begin("all_reduce", (sums, SUMS), {})
                sums = await handle
                contributors = handle.contributors or ()
            merged = _merged(said, [uid in contributors for uid in uids], sums)
            # Else all ranks that had a value are lost since it was announced.
            if all(merged.counts):
                return merged, contributors

    def _told(self) -> tuple[list[MergedPart], list[list[HostArray]], str | None]:
        """Return the parts of this rank and their arrays, or the fault for which they cannot be read."""
        try:
            return *_parts_of(self._values()), None
        except ConfigError as error:
            return [], [], sendable(str(error))
        except Exception as error:  # noqa: BLE001  whatever the caller's objects raise, the others learn of it
            return [], [], unreadable("the state", error)

    def _values(self) -> list[Snapshot]:
        return [Snapshot.of(self._state), *(copy.values() for copy in self.copies)]

    def _load(self, merged: Conversion, size: int) -> None:
        found: dict[int, dict[tuple[Any, ...], Any]] = {}
        for number, place, value in merged.values(size):
            found.setdefault(number, {})[place] = value
        for number, parts in found.items():
            if number:
                self.copies[number - 1].set_parts(parts)
            else:
                set_parts(self._state, parts)


def _parts_of(snapshots: Sequence[Snapshot]) -> tuple[list[MergedPart], list[list[HostArray]]]:
    """Return what differs in these values, and the arrays of each part.

    Raises:
        ConfigError: an array of whole numbers would have to be divided.
    """
    parts, views = [], []
    for number, values in enumerate(snapshots):
        for name, key, how in values.ways:
            tree = values.objects[name][key[0]] if key else values.plain[name]
            part = MergedPart([number, name, *key], how, described(tree, has_numbers=True), [], [])
            found = [(shown(path), adapt(one)) for path, one in leaves(tree, (part.title,)) if is_number(one)]
            for path, view in found:
                is_converted = view.dtype.kind in "fc" or view.dtype.name == "bfloat16"
                if how == "sum" and not is_converted:
                    raise ConfigError(f"{path} is to be divided among ranks, and is of {view.dtype}: give floats")
                part.plan.append([path, list(view.shape), str(view.dtype)])
                part.others.append(None if is_converted else view.flat.tobytes())
            parts.append(part)
            views.append([view for _, view in found])
    return parts, views


def _forms(said: Sequence[Sequence[MergedPart]]) -> list[MergedPart]:
    """Return the form of each part: that of the lowest rank that has the most arrays.

    Raises:
        ConfigError: another rank has an array that does not fit; the same error on all ranks.
    """
    found: dict[str, tuple[int, MergedPart]] = {}
    for rank, parts in enumerate(said):
        for part in parts:
            known = found.get(repr(part.place))
            if known is None or len(part.plan) > len(known[1].plan):
                found[repr(part.place)] = rank, part
    for rank, parts in enumerate(said):
        for part in parts:
            first, like = found[repr(part.place)]
            whole = {one[0]: one for one in like.plan}
            unlike = next((one for one in part.plan if whole.get(one[0]) != one), None)
            if unlike is not None:
                raise ConfigError(_difference(rank, unlike, first, whole.get(unlike[0])))
            if part.how != like.how:
                raise ConfigError(f"{part.title} is converted by {part.how} on rank {rank}, {like.how} on rank {first}")
    return [part for _, part in found.values()]


def _difference(rank: int, mine: list[Any], other: int, theirs: list[Any] | None) -> str:
    there = "missing" if theirs is None else f"{theirs[2]}{tuple(theirs[1])}"
    return (
        f"{mine[0]} is {mine[2]}{tuple(mine[1])} on rank {rank} and {there} on rank {other}: what differs between ranks"
        " has one form on those that have it"
    )


def _buffer(forms: Sequence[MergedPart], mine: Sequence[MergedPart], views: Sequence[Sequence[HostArray]]) -> Array:
    """Return this rank's converted arrays in the order of the forms, zeros for those that it lacks."""
    having = {
        path: view
        for part, some in zip(mine, views, strict=True)
        for path, view in zip(_paths(part), some, strict=True)
    }
    found: list[Array] = [np.empty(0)]
    for form in forms:
        for path, (_, shape, name), other in zip(_paths(form), form.plan, form.others, strict=True):
            view = having.get(path)
            if other is not None:
                continue
            if view is None:
                found.append(np.zeros(_width(shape, dtype_of(name))))
            elif view.dtype.kind == "c":
                found.append(view.flat.astype(np.complex128).view(np.float64))
            else:
                found.append(view.flat.astype(np.float64))
    return np.concatenate(found)


def _merged(said: Sequence[Sequence[MergedPart]], have_given: Sequence[bool], sums: Array) -> Conversion:
    """Return the sums with the number of ranks behind each array."""
    forms = _forms(said)
    having = [{path for part in parts for path in _paths(part)} for parts in said]
    counts = [
        sum(path in one for one, has_given in zip(having, have_given, strict=True) if has_given) if other is None else 1
        for form in forms
        for path, other in zip(_paths(form), form.others, strict=True)
    ]
    return Conversion(forms, sums, counts)


def _paths(part: MergedPart) -> list[tuple[int, str]]:
    return [(part.place[0], path) for path, _, _ in part.plan]


def _width(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * (2 if dtype.kind == "c" else 1)
