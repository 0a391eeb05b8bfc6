"""State of training between two steps: arrays and small values, the same on all ranks, and sent to joining ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays import adapt, adapt_out, same_memory
from kfcomm.arrays.kinds import is_array_type
from kfcomm.arrays.on_device import is_on_device
from kfcomm.arrays.pages import populate
from kfcomm.elastic.checks import MappingKey, Path, check, order_of, plain_key, sendable, shown, unreadable
from kfcomm.errors import ConfigError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_made: weakref.WeakSet[State] = weakref.WeakSet()
"""All states of this process, for ``make_ready``."""


class State:
    """Arrays and small values by name, as attributes; the same on all ranks at the boundary of a step.

    ::

        state = State(weights=weights, momentum={"w": np.zeros(3)}, step=0)
        state.weights -= 0.1 * gradient
        state.step += 1

    A value is an array (NumPy, torch, JAX), a value that msgpack can carry (numbers, text, bytes, None), or a
    dictionary, list, tuple or named tuple of such values, as torch's ``state_dict()`` and JAX's trees are. Arrays that
    are writeable are loaded in place (a tensor of a ``state_dict()`` is the module's own memory); JAX's are replaced.

    Keys of a dictionary are text, bytes, numbers, bools or None. A value that cannot be sent to other ranks is refused
    on assignment; one that is put into a dictionary or list of the state later is refused at the next boundary between
    two steps, on all ranks (with many thousands of values, at one of the next boundaries).

    Raises:
        ConfigError: a value, or one inside it, is of another kind; with its path.
    """

    _values: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name.startswith("_"):
                raise ConfigError(f"a name in a state does not begin with an underscore: {name!r}")
            check(value, name)
        object.__setattr__(self, "_values", dict(values))
        _made.add(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"this state has no {name!r}; it has {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise ConfigError(f"a state has what it was made with: {', '.join(self._values)}; not {name!r}")
        check(value, name)
        self._values[name] = value

    def __repr__(self) -> str:
        return f"State({', '.join(self._values)})"


def fault_of(state: State) -> str | None:
    """Return the fault of a state that cannot be sent to other ranks, or cannot be read; else None."""
    # Arrays are not read: 0.2 µs for each value, so that each boundary can look.
    try:
        for name, value in state._values.items():
            check(value, name, is_quick=True)
    except Exception as error:  # noqa: BLE001  whatever the caller's objects raise
        return sendable(str(error)) if isinstance(error, ConfigError) else unreadable("the state", error)
    return None


def arrays_of(state: State) -> list[tuple[str, Any]]:
    """Return its arrays, each with its path, in an order that depends on the paths only."""
    return [(shown(path), value) for path, value in _leaves(state._values) if _is_array(value)]


def plan_of(state: State) -> list[list[Any]]:
    """Return path, shape and dtype of each array; msgpack can carry it."""
    return [[place, list(view.shape), str(view.dtype)] for place, view in ((p, adapt(x)) for p, x in arrays_of(state))]


def outline_of(state: State) -> list[Any]:
    """Return its names, and the kinds of the containers around each array, mappings or lists; msgpack can carry it."""
    paths = [path for path, value in _leaves(state._values) if _is_array(value)]
    kinds = ["".join("m" if isinstance(one, MappingKey) else "l" for one in path) for path in paths]
    return [sorted(state._values), kinds]


def make_ready() -> None:
    """Populate the memory of all states of this process, from any thread; values do not change."""
    # While this rank waits to be let in. Else all ranks would wait for its page faults, which take as long as writing
    # zeros to new memory.
    for state in list(_made):
        for _, array in arrays_of(state):
            if not is_on_device(array):
                view = adapt(array)
                if view.is_view and view.flat.flags.writeable:
                    populate(view.flat)


def places_of(state: State) -> list[Array]:
    """Return memory into which its arrays can be received, flat: their own where that is writeable, else new."""
    return [_place_of(array) for _, array in arrays_of(state)]


def small_of(state: State) -> Any:
    """Return its values without arrays; msgpack can carry them."""
    return _without_arrays(state._values)


def load(state: State, arrays: list[Array], small: Any) -> None:
    """Load another rank's values: arrays in the order of ``arrays_of``, in place where they are writeable."""
    given = iter(arrays)
    for name in sorted(state._values):
        state._values[name] = _loaded(state._values[name], given, small[name])


def described(state: State) -> Any:
    """Describe it without the contents of arrays, for ``rebuilt`` on a rank with another form; msgpack can carry it."""
    # A leaf is [0, value], an array [1], a list [2, items] and a mapping [3, pairs], sorted by key.
    return _described(state._values)


def rebuilt(tree: Any, arrays: list[Array]) -> dict[str, Any]:
    """Rebuild the values of ``described``, with these arrays in the order of ``arrays_of``."""
    given = iter(arrays)
    found: dict[str, Any] = _rebuilt(tree, given)
    return found


class Kept:
    """Copy of a state, to restore it or to write it while training continues."""

    def __init__(self, state: State) -> None:
        self.place: Any = None  # position of training, or another value that was copied with it
        self._state = state
        self.plan: list[list[Any]] = []  # see ``plan_of``
        self.arrays: list[Array] = []  # flat, in the order of ``arrays_of``
        self.outline: list[Any] = []  # see ``outline_of``
        self.small: Any = None  # see ``small_of``

    def keep(self, place: Any) -> None:
        """Copy the state now."""
        views = [adapt(array).flat for _, array in arrays_of(self._state)]
        # Page faults of new memory take longer than the copy, so buffers are reused.
        if [(one.size, one.dtype) for one in views] != [(one.size, one.dtype) for one in self.arrays]:
            self.arrays = [np.empty(one.size, one.dtype) for one in views]
        for copy, view in zip(self.arrays, views, strict=True):
            copy[:] = view
        self.plan, self.outline = plan_of(self._state), outline_of(self._state)
        self.small = small_of(self._state)
        self.place = place

    def restore(self) -> None:
        """Restore the state from the copy."""
        load(self._state, self.arrays, self.small)


def difference(mine: list[list[Any]], theirs: list[list[Any]], there: str) -> str | None:
    """Describe how the arrays of this rank differ from those of ``there``; None if they do not."""
    for own, other in zip(mine, theirs, strict=False):
        if own[0] != other[0]:
            return f"this rank's state has {own[0]} where that of {there} has {other[0]}"
        if own != other:
            sides = (f"{one[2]}{tuple(one[1])}" for one in (own, other))
            return f"{own[0]} is {next(sides)} here and {next(sides)} on {there}"
    if len(mine) != len(theirs):
        more = (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))][0]
        return f"{more} is in the state of {'this rank' if len(mine) > len(theirs) else there} alone"
    return None


def _is_array(value: Any) -> bool:
    kind: Any = type(value)
    return is_array_type(kind)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=order_of):
            plain = plain_key(key)
            yield from _leaves(value[key], (*path, MappingKey(plain) if path else plain))
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from _leaves(one, (*path, place))
    else:
        yield path, value


def _described(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [3, [[plain_key(key), _described(value[key])] for key in sorted(value, key=order_of)]]
    if isinstance(value, (list, tuple)):
        return [2, [_described(one) for one in value]]
    return [1] if _is_array(value) else [0, value]


def _rebuilt(tree: Any, arrays: Iterator[Array]) -> Any:
    match tree:
        case [3, pairs]:
            return {key: _rebuilt(one, arrays) for key, one in pairs}
        case [2, items]:
            return [_rebuilt(one, arrays) for one in items]
        case [1]:
            return next(arrays)
        case [_, value]:
            return value


def _without_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {plain_key(key): _without_arrays(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(one) for one in value]
    return None if _is_array(value) else value


def _has_arrays(value: Any) -> bool:
    return any(_is_array(leaf) for _, leaf in _leaves(value))


def _loaded(value: Any, arrays: Iterator[Array], small: Any) -> Any:
    """Load a value in the order of `_leaves`. Containers without arrays are replaced, whatever their new length."""
    if not _has_arrays(value):
        return _of_kind(value, small)
    if isinstance(value, Mapping):
        return _loaded_mapping(value, arrays, small)
    if isinstance(value, (list, tuple)):
        held = [_loaded(one, arrays, small[place] if place < len(small) else None) for place, one in enumerate(value)]
        return _sequence(value, [*held[: len(small)], *small[len(held) :]])
    return _written(value, next(arrays))


def _loaded_mapping(value: Mapping[Any, Any], arrays: Iterator[Array], small: dict[Any, Any]) -> Any:
    """Load a mapping. Entries under keys of one side only hold no arrays: the arrays of both have the same paths."""
    plain = {plain_key(key): key for key in sorted(value, key=order_of)}
    found = {key: _loaded(value[key], arrays, small[one]) for one, key in plain.items() if one in small}
    found |= {one: what for one, what in small.items() if one not in plain}
    if not isinstance(value, dict):
        return type(value)(found)  # type: ignore[call-arg]
    # In place: the program may hold this very dictionary, as torch's optimizers do.
    for key in value.keys() - found.keys():
        del value[key]
    value.update(found)
    return value


def _of_kind(value: Any, small: Any) -> Any:
    """Convert received lists to tuples where ``value`` has tuples."""
    if isinstance(value, Mapping) and isinstance(small, dict):
        return {key: _of_kind(value.get(key), one) for key, one in small.items()}
    if isinstance(value, (list, tuple)) and isinstance(small, list):
        items = [_of_kind(value[place] if place < len(value) else None, one) for place, one in enumerate(small)]
        return _sequence(value, items)
    return small


def _sequence(like: Sequence[Any], items: list[Any]) -> Any:
    """Make a list or tuple of the same kind; named tuples, such as optax's states, take their items one by one."""
    kind: Any = type(like)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _place_of(array: Any) -> Array:
    view = adapt(array)
    try:
        return adapt_out(array, view.shape, view.dtype).flat
    except ConfigError:
        return np.empty(view.size, view.dtype)


def _written(array: Any, now: Array) -> Any:
    """Write new contents to an array; returns it, or a new one of its kind if it is not writeable."""
    view = adapt(array)
    try:
        out = adapt_out(array, view.shape, view.dtype)
    except ConfigError:
        return view.restore(np.array(now, view.dtype).reshape(-1))
    # What was received into ``places_of`` is there already.
    if not same_memory(out.flat, now):
        out.flat[:] = now.reshape(-1)
    return out.finish()
