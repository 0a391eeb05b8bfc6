"""What training is made of between two steps: arrays and small values, the same on all ranks, and given to new ones."""

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
"""All of this process, for ``make_ready``."""


class State:
    """Arrays and small values by name, as attributes: what all ranks have alike at a step's boundary.

    ::

        state = State(weights=weights, momentum={"w": np.zeros(3)}, step=0)
        state.weights -= 0.1 * gradient
        state.step += 1

    A value is an array (NumPy, torch, JAX), what msgpack can carry (numbers, text, bytes, None), or a dictionary, list
    or tuple of such, named ones too: torch's ``state_dict()`` and JAX's trees of these are. What can be written to is
    (a tensor of a ``state_dict()`` is the module's own memory); of JAX, whose arrays cannot, there are new ones then.

    Keys of a dictionary are text, bytes, numbers, bools or None. What cannot be sent to other ranks is refused where it
    is assigned; what is put into a dictionary or list of the state later, at the next boundary between two steps, on
    all ranks (of a state of many thousands of values, at one of the next).

    Raises:
        ConfigError: a value, or one inside it, is none of these; names its path.
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
    """Fault of a state that cannot be sent to other ranks, or cannot be read; None without a fault.

    Cost: some 0.2 µs for each value; arrays are not read.
    """
    try:
        for name, value in state._values.items():
            check(value, name, is_quick=True)
    except Exception as error:  # noqa: BLE001  whatever the caller's objects raise
        return sendable(str(error)) if isinstance(error, ConfigError) else unreadable("the state", error)
    return None


def arrays_of(state: State) -> list[tuple[str, Any]]:
    """Its arrays, each with its place in words, in an order that depends on names alone."""
    return [(shown(path), value) for path, value in _leaves(state._values) if _is_array(value)]


def plan_of(state: State) -> list[list[Any]]:
    """Place, shape and dtype of each array; msgpack can carry it."""
    return [[place, list(view.shape), str(view.dtype)] for place, view in ((p, adapt(x)) for p, x in arrays_of(state))]


def outline_of(state: State) -> list[Any]:
    """Its names, and of each array whether the containers around it are mappings or lists; msgpack can carry it."""
    paths = [path for path, value in _leaves(state._values) if _is_array(value)]
    kinds = ["".join("m" if isinstance(one, MappingKey) else "l" for one in path) for path in paths]
    return [sorted(state._values), kinds]


def make_ready() -> None:
    """Have the system give the memory of all states that this process has made, before others wait for it to come.

    Costs about what writing zeros to new memory does; nothing changes. May be called by any thread.
    """
    for state in list(_made):
        for _, array in arrays_of(state):
            if not is_on_device(array):
                view = adapt(array)
                if view.is_view and view.flat.flags.writeable:
                    populate(view.flat)


def places_of(state: State) -> list[Array]:
    """Where its arrays can be received, flat: their own memory, or other where that cannot be written to."""
    return [_place_of(array) for _, array in arrays_of(state)]


def small_of(state: State) -> Any:
    """All that is no array; msgpack can carry it."""
    return _without_arrays(state._values)


def load(state: State, arrays: list[Array], small: Any) -> None:
    """Take over another rank's values: arrays of ``arrays_of``'s order, in place where their kind can be written to."""
    given = iter(arrays)
    for name in sorted(state._values):
        state._values[name] = _loaded(state._values[name], given, small[name])


def described(state: State) -> Any:
    """All of it but what is in arrays, for ``rebuilt`` on a rank whose own is of another form; msgpack can carry it.

    A leaf is ``[0, value]``, an array ``[1]``, a list ``[2, items]`` and a mapping ``[3, pairs]``, sorted by key.
    """
    return _described(state._values)


def rebuilt(tree: Any, arrays: list[Array]) -> dict[str, Any]:
    """The values that were described, with these arrays in the order of ``arrays_of``."""
    given = iter(arrays)
    found: dict[str, Any] = _rebuilt(tree, given)
    return found


class Kept:
    """A copy of a state as it was.

    Args:
        state: of which it is.

    Attributes:
        plan: of the arrays, as ``plan_of`` tells it.
        arrays: flat, in the order of ``arrays_of``.
        outline: see ``outline_of``.
        small: see ``small_of``.
        place: in the pass, or what else was kept with it.
    """

    def __init__(self, state: State) -> None:
        self.place: Any = None
        self._state = state
        self.plan: list[list[Any]] = []
        self.arrays: list[Array] = []
        self.outline: list[Any] = []
        self.small: Any = None

    def keep(self, place: Any) -> None:
        """Copy it as it is now. Costs a copy of its arrays, and no memory but the first time."""
        views = [adapt(array).flat for _, array in arrays_of(self._state)]
        if [(one.size, one.dtype) for one in views] != [(one.size, one.dtype) for one in self.arrays]:
            self.arrays = [np.empty(one.size, one.dtype) for one in views]
        for copy, view in zip(self.arrays, views, strict=True):
            copy[:] = view
        self.plan, self.outline = plan_of(self._state), outline_of(self._state)
        self.small = small_of(self._state)
        self.place = place

    def restore(self) -> None:
        """The state is again as it was when it was last copied."""
        load(self._state, self.arrays, self.small)


def difference(mine: list[list[Any]], theirs: list[list[Any]], there: str) -> str | None:
    """How the arrays of this rank differ from those of another place (``there``), in words; None if they do not."""
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
    """In the order of `_leaves`. What holds no array is taken over as it is, however long it has become."""
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
    for key in value.keys() - found.keys():
        del value[key]
    value.update(found)
    return value


def _of_kind(value: Any, small: Any) -> Any:
    """What came, in which all sequences are lists, with tuples where ``value`` has them."""
    if isinstance(value, Mapping) and isinstance(small, dict):
        return {key: _of_kind(value.get(key), one) for key, one in small.items()}
    if isinstance(value, (list, tuple)) and isinstance(small, list):
        items = [_of_kind(value[place] if place < len(value) else None, one) for place, one in enumerate(small)]
        return _sequence(value, items)
    return small


def _sequence(like: Sequence[Any], items: list[Any]) -> Any:
    """A list for a list, a tuple for a tuple; one with names, as optax's states are, takes its items one by one."""
    kind: Any = type(like)
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _place_of(array: Any) -> Array:
    view = adapt(array)
    try:
        return adapt_out(array, view.shape, view.dtype).flat
    except ConfigError:
        return np.empty(view.size, view.dtype)


def _written(array: Any, now: Array) -> Any:
    """The caller's array with other contents; another one of its kind where that cannot be written to.

    ``now`` may be the memory of the array itself, as ``places_of`` gives it: then they are there.
    """
    view = adapt(array)
    try:
        out = adapt_out(array, view.shape, view.dtype)
    except ConfigError:
        return view.restore(np.array(now, view.dtype).reshape(-1))
    if not same_memory(out.flat, now):
        out.flat[:] = now.reshape(-1)
    return out.finish()
