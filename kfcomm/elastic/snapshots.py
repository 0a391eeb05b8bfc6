"""Values of a state at one moment, in a form in which they travel, are copied, and are written to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt, dtype_of
from kfcomm.elastic.checks import plain_key
from kfcomm.elastic.state import (
    WAYS,
    State,
    arrays_in,
    load,
    loaded,
    outline_of,
    plain_values,
    planned,
    state_of,
    without_arrays,
)
from kfcomm.elastic.trees import Array, described, rebuilt
from kfcomm.errors import ConfigError


class Form(NamedTuple):
    """Values of a state without the contents of its arrays; msgpack can carry it."""

    plan: list[list[Any]]  # path, shape and dtype of each array that is not of an object
    outline: list[Any]  # names with their kinds, and the containers around each of these arrays
    small: Any  # description of the values that are not of objects
    objects: Any  # description of the states of objects, by name
    parts: list[list[Any]]  # path, shape and dtype of each array in these
    ways: list[list[Any]]  # see ``Snapshot``

    def values(self, arrays: Sequence[Array], *, as_numpy: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rebuild the values and the states of objects, around arrays in the order of ``Snapshot.forms``."""
        shaped = (one.reshape(shape) for one, (_, shape, _) in zip(arrays, [*self.plan, *self.parts], strict=True))
        plain, objects = (rebuilt(tree, shaped, as_numpy=as_numpy) for tree in (self.small, self.objects))
        return plain, objects

    def new_parts(self) -> list[Array]:
        """Return new memory for the arrays of objects, flat."""
        return [np.empty(math.prod(shape), dtype_of(dtype)) for _, shape, dtype in self.parts]

    def sizes(self) -> list[tuple[int, np.dtype[Any]]]:
        """Return the number of bytes, and the dtype, of each array."""
        kinds = [(math.prod(shape), dtype_of(dtype)) for _, shape, dtype in (*self.plan, *self.parts)]
        return [(size * kind.itemsize, kind) for size, kind in kinds]


NOTHING = Form([], [], described({}), described({}), [], [])
"""Form of a state without values."""


class Snapshot(NamedTuple):
    """Values of a state at one moment."""

    plain: dict[str, Any]  # values that are not objects
    objects: dict[str, Any]  # states of objects
    outline: list[Any]  # see ``outline_of``
    # Values that differ between ranks: name, a list of the key in the state of an object (empty for a whole value), and
    # the conversion.
    ways: list[list[Any]]

    @classmethod
    def of(cls, state: State) -> Snapshot:
        """Read a state now; its arrays are in the memory of the state itself where they can be.

        Raises:
            ConfigError: the state of an object cannot be read, or sent.
        """
        plain = plain_values(state)
        objects = {name: state_of(one, name) for name, one in state._values.items() if name not in plain}
        ways = [way for name in sorted(state._values) for way in _ways_of(state, name, objects.get(name))]
        return cls(plain, objects, outline_of(state), ways)

    def forms(self) -> tuple[Form, list[Array]]:
        """Return its form, and its arrays, flat, those of objects last."""
        views = [[(place, adapt(one)) for place, one in arrays_in(tree)] for tree in (self.plain, self.objects)]
        flat = [view.flat for some in views for _, view in some]
        small, objects = described(self.plain), described(self.objects)
        return Form(planned(views[0]), self.outline, small, objects, planned(views[1]), self.ways), flat


def _ways_of(state: State, name: str, tree: Any) -> Iterator[list[Any]]:
    """Yield the values of a name that differ between ranks.

    Raises:
        ConfigError: an object's ``merging`` is not as `State` describes it.
    """
    how = state._ways.get(name)
    if tree is None:
        if how is not None:
            yield [name, [], how]
        return
    merging = getattr(state._values[name], "merging", None)
    given = dict.fromkeys(tree, how) if how is not None else merging() if callable(merging) else {}
    for key, one in given.items():
        if one not in WAYS:
            raise ConfigError(f"{name}.merging() gives {one!r} for {key!r}: expected one of {', '.join(WAYS)}")
        if key in tree:
            yield [name, [plain_key(key)], one]


def load_form(state: State, form: Form, arrays: list[Array], *, likes: Mapping[str, Any] | None = None) -> None:
    """Load another rank's values, also of objects.

    Args:
        state: what to load into.
        form: of the values.
        arrays: in the order of ``Snapshot.forms``. Objects may keep those that are theirs.
        likes: states of the objects of this rank, see ``rebuilt``.
    """
    num = len(form.plan)
    load(state, arrays[:num], rebuilt(form.small, repeat(None), as_numpy=True))
    shaped = (one.reshape(shape) for one, (_, shape, _) in zip(arrays[num:], form.parts, strict=True))
    for name, tree in rebuilt(form.objects, shaped, likes).items():
        state._values[name].load_state_dict(tree)


def set_parts(state: State, parts: Mapping[tuple[Any, ...], Any]) -> None:
    """Set values of a state, and keys of the states of objects, by name or name and key; all objects are loaded."""
    # Objects get no memory of their own back: they may begin by clearing what they have.
    now = Snapshot.of(state)
    for name, tree in now.objects.items():
        if any(place[0] == name for place in parts):
            copies = (adapt(one).flat.copy().reshape(adapt(one).shape) for _, one in arrays_in(tree))
            whole = rebuilt(described(tree), copies, tree)
            mine = {place[1]: one for place, one in parts.items() if place[0] == name}
            whole |= {key: _named_like(one, tree.get(key)) for key, one in mine.items()}
            state._values[name].load_state_dict(whole)
    for name in now.plain.keys() & {place[0] for place in parts}:
        state._values[name] = _replaced(state._values[name], parts[name,])


def _named_like(tree: Any, like: Any) -> Any:
    """Return a tree with named tuples where ``like`` has them."""
    return rebuilt(described(tree), (one for _, one in arrays_in(tree)), like, as_numpy=True)


def _replaced(value: Any, new: Any) -> Any:
    """Return a value with new contents: its arrays are written in place where they can be."""
    plans = [planned((place, adapt(one)) for place, one in arrays_in(tree)) for tree in (value, new)]
    if plans[0] != plans[1]:
        return new
    return loaded(value, (adapt(one).flat for _, one in arrays_in(new)), without_arrays(new), set())


class Kept:
    """Copy of a state, to restore it or to write it while training continues."""

    def __init__(self, state: State) -> None:
        self.place: Any = None  # position of training, or another value that was copied with it
        self._state = state
        self.form = NOTHING
        self.arrays: list[Array] = []  # flat, in the order of ``Snapshot.forms``

    def keep(self, place: Any) -> None:
        """Copy the state now."""
        self.place = place
        self._copy(Snapshot.of(self._state))

    def _copy(self, values: Snapshot) -> None:
        form, flat = values.forms()
        # Page faults of new memory take longer than the copy, so buffers are reused.
        if [(one.size, one.dtype) for one in flat] != [(one.size, one.dtype) for one in self.arrays]:
            self.arrays = [np.empty(one.size, one.dtype) for one in flat]
        for copy, view in zip(self.arrays, flat, strict=True):
            copy[:] = view
        self.form = form

    def take(self, form: Form, arrays: list[Array], place: Any) -> None:
        """Hold another rank's copy instead."""
        self.form, self.arrays, self.place = form, arrays, place

    def restore(self) -> None:
        """Restore the state from the copy."""
        plain = len(self.form.plan)
        # An object may keep the arrays that it is given, and this copy may be restored again.
        load_form(self._state, self.form, [*self.arrays[:plain], *(one.copy() for one in self.arrays[plain:])])

    def values(self) -> Snapshot:
        """Return the values of the copy, in its memory."""
        return Snapshot(*self.form.values(self.arrays, as_numpy=False), self.form.outline, self.form.ways)

    def set_parts(self, parts: Mapping[tuple[Any, ...], Any]) -> None:
        """Set values of the copy, as the function of this name does in a state."""
        values = self.values()
        for (name, *key), tree in parts.items():
            if key:
                values.objects[name][key[0]] = tree
            else:
                values.plain[name] = tree
        self._copy(values)
