"""State of training between two steps: arrays and small values, the same on all ranks, and sent to joining ranks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kfcomm.arrays import HostArray, adapt, adapt_out, same_memory
from kfcomm.arrays.on_device import is_on_device
from kfcomm.arrays.pages import populate
from kfcomm.elastic.checks import MappingKey, check, order_of, plain_key, sendable, shown, unreadable
from kfcomm.elastic.trees import Array as Array
from kfcomm.elastic.trees import is_array, leaves, on_host, sequence
from kfcomm.errors import ConfigError

_made: weakref.WeakSet[State] = weakref.WeakSet()
"""All states of this process, for ``make_ready``."""
WAYS = ("mean", "sum")
"""Conversions of values that differ between ranks."""


class PerRank:
    """Value of a state that differs between ranks, and how it is converted when the ranks change.

    ::

        state = State(weights=PerRank(weights, "mean"), step=0)
        state.weights -= 0.1 * gradient  # the value itself

    Args:
        value: array, number, or containers of them; or an object with state, all of whose arrays differ.
        how: ``"mean"``: all ranks continue with the mean of the ranks that have it. ``"sum"``: with the sum divided by
            the new number of ranks, so that the total stays the same. Only floating-point and complex values are
            converted; others become those of the lowest rank.

    Raises:
        ConfigError: ``how`` is neither.
    """

    def __init__(self, value: Any, how: str) -> None:
        if how not in WAYS:
            raise ConfigError(f"a value of each rank is converted by one of {', '.join(WAYS)}, not {how!r}")
        self.value = value
        self.how = how


class State:
    """Arrays, small values and objects by name, as attributes; the same on all ranks at the boundary of a step.

    ::

        state = State(weights=weights, momentum={"w": np.zeros(3)}, step=0, model=module, optimizer=optimizer)
        state.weights -= 0.1 * gradient
        state.step += 1

    A value is an array (NumPy, torch, JAX), a value that msgpack can carry (numbers, text, bytes, None), or a
    dictionary, list, tuple or named tuple of such values, as JAX's trees are. Arrays that are writeable are loaded in
    place (a tensor of a ``state_dict()`` is the module's own memory); JAX's are replaced.

    Or it is an object with ``state_dict()`` and ``load_state_dict(tree)``: a torch module, optimizer or scheduler, an
    algorithm, a monitor. Its state is such values in containers, also in the memory of a device. It is read when it is
    needed only, so that its form may change: an optimizer has no state before its first step. A joining rank gets the
    form of the others, with new arrays in host memory. ``load_state_dict`` must not communicate.

    What differs between ranks is a `PerRank` value, or a key of an object's ``state_dict()`` that its ``merging()``
    returns, with ``"mean"`` or ``"sum"``.

    Keys of a dictionary are text, bytes, numbers, bools or None. A value that cannot be sent to other ranks is refused
    on assignment; one that is put into a dictionary or list of the state later is refused at the next boundary between
    two steps, on all ranks (with many thousands of values, at one of the next boundaries); one in an object's state
    when that is read.

    Raises:
        ConfigError: a value, or one inside it, is of another kind; with its path.
    """

    _values: dict[str, Any]
    _ways: dict[str, str]
    _objects: frozenset[str]

    def __init__(self, **values: Any) -> None:
        plain = {name: one.value if isinstance(one, PerRank) else one for name, one in values.items()}
        for name, value in plain.items():
            if name.startswith("_"):
                raise ConfigError(f"a name in a state does not begin with an underscore: {name!r}")
            _check_value(value, name)
        object.__setattr__(self, "_values", plain)
        object.__setattr__(self, "_objects", frozenset(name for name, value in plain.items() if has_state(value)))
        object.__setattr__(self, "_ways", {name: one.how for name, one in values.items() if isinstance(one, PerRank)})
        _made.add(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"this state has no {name!r}; it has {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise ConfigError(f"a state has what it was made with: {', '.join(self._values)}; not {name!r}")
        if isinstance(value, PerRank) or has_state(value) != (name in self._objects):
            raise ConfigError(f"{name} of this state stays of its kind: a value, or an object with state_dict")
        _check_value(value, name)
        self._values[name] = value

    def __repr__(self) -> str:
        return f"State({', '.join(self._values)})"


def has_state(value: Any) -> bool:
    """Whether a value is an object with ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, (type, Mapping, list, tuple)) or is_array(value):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _check_value(value: Any, name: str) -> None:
    if has_state(value):
        state_of(value, name)
    else:
        check(value, name)


def state_of(value: Any, name: str) -> Any:
    """Return the state of an object, with arrays in host memory.

    Raises:
        ConfigError: it cannot be read, or holds a value that cannot be sent; with its path.
    """
    try:
        tree = on_host(value.state_dict())
    except Exception as error:
        raise ConfigError(unreadable(f"{name}.state_dict()", error)) from error
    check(tree, name)
    return tree


def fault_of(state: State) -> str | None:
    """Return the fault of a state that cannot be sent to other ranks, or cannot be read; else None."""
    # Arrays are not read: 0.2 µs for each value, so that each boundary can look. Objects are not asked for their state.
    try:
        for name, value in plain_values(state).items():
            check(value, name, is_quick=True)
    except Exception as error:  # noqa: BLE001  whatever the caller's objects raise
        return sendable(str(error)) if isinstance(error, ConfigError) else unreadable("the state", error)
    return None


LOOKS_ALWAYS_S = 2e-3
"""A state whose check takes less is checked at each boundary."""
LOOKS_SHARE = 50
"""Another state is checked again after this many times the duration of its check."""


class StateChecks:
    """Checks of a state at boundaries, which take a small share of the time."""

    def __init__(self, state: State) -> None:
        self.fault: str | None = None  # met by another reader of the state
        self._state = state
        self._looks_at_s = 0.0

    def look(self) -> str | None:
        """Return the fault of the state, if one was met, or is found by a check that is due."""
        now_s = time.monotonic()
        if self.fault is not None or now_s < self._looks_at_s:
            return self.fault
        fault = fault_of(self._state)
        if time.monotonic() - now_s > LOOKS_ALWAYS_S:
            # Again: the time of this thread alone says how long it takes on a busy machine, and costs a system call.
            began_s = time.thread_time()
            fault = fault_of(self._state)
            took_s = time.thread_time() - began_s
            self._looks_at_s = now_s + (LOOKS_SHARE * took_s if took_s > LOOKS_ALWAYS_S else 0)
        return fault


def may_hold(state: State, results: Sequence[Array]) -> bool:
    """Whether a state may have one of these results, or a part of one: an object may have any."""
    if not results or state._objects:
        return bool(results)
    own = {id(_root(array)) for _, array in arrays_of(state)}
    return bool(own) and any(id(_root(one)) in own for one in results)


def _root(array: Any) -> Any:
    """Array that has the memory of another one."""
    while isinstance(base := getattr(array, "base", None), np.ndarray):
        array = base
    return array


def arrays_of(state: State) -> list[tuple[str, Any]]:
    """Return its arrays without those of objects, each with its path, in an order that depends on the paths only."""
    return arrays_in(plain_values(state))


def plan_of(state: State) -> list[list[Any]]:
    """Return path, shape and dtype of each array that is not of an object; msgpack can carry it."""
    return planned((place, adapt(array)) for place, array in arrays_of(state))


def make_ready() -> None:
    """Populate the memory of all states of this process, from any thread; values do not change."""
    # While this rank waits to be let in. Else all ranks would wait for its page faults, which take as long as writing
    # zeros to new memory. Objects have no memory for what they are to receive.
    for state in list(_made):
        for _, array in arrays_of(state):
            if not is_on_device(array):
                view = adapt(array)
                if view.is_view and view.flat.flags.writeable:
                    populate(view.flat)


def small_of(state: State) -> Any:
    """Return its values without arrays and objects."""
    return without_arrays(plain_values(state))


def outline_of(state: State) -> list[Any]:
    """Return its names with their kinds, and the containers around each array, mappings or lists."""
    plain = plain_values(state)
    paths = [path for path, value in leaves(plain) if is_array(value)]
    kinds = ["".join("m" if isinstance(one, MappingKey) else "l" for one in path) for path in paths]
    names = [f"{name}{_kind(state, name)}" for name in sorted(state._values)]
    return [names, kinds]


def _kind(state: State, name: str) -> str:
    value, how = state._values[name], state._ways.get(name)
    if has_state(value):
        what = " (an object with merging)" if has_merging(value) else " (an object)"
    else:
        what = ""
    return what + (f" ({how} of ranks)" if how else "")


def has_per_rank(state: State) -> bool:
    """Whether a value of a state is marked as `PerRank`."""
    return bool(state._ways)


def may_differ(state: State) -> bool:
    """Whether values may differ between ranks; the same on all ranks while an ``Elastic`` is open."""
    return has_per_rank(state) or any(has_merging(one) for one in state._values.values())


def has_merging(value: Any) -> bool:
    """Whether a value is an object that may say how its state is converted."""
    return has_state(value) and callable(getattr(value, "merging", None))


def places_of(state: State) -> list[Array]:
    """Return memory into which its arrays can be received, flat: their own where that is writeable, else new.

    An array under two names may have two contents by now: only the first is received into it.
    """
    arrays = [array for _, array in arrays_of(state)]
    first = {id(array): place for place, array in reversed(list(enumerate(arrays)))}
    return [_place_of(array, is_own=first[id(array)] == place) for place, array in enumerate(arrays)]


def load(state: State, arrays: list[Array], small: Any) -> None:
    """Load another rank's values: arrays in the order of ``arrays_of``, in place where they are writeable."""
    given, seen = iter(arrays), set[int]()
    for name in sorted(plain_values(state)):
        state._values[name] = loaded(state._values[name], given, small[name], seen)


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


def arrays_in(tree: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a tree, each with its path, in an order that depends on the paths only."""
    return [(shown(path) if path else "", value) for path, value in leaves(tree) if is_array(value)]


def planned(views: Iterable[tuple[str, HostArray]]) -> list[list[Any]]:
    """Return path, shape and dtype of each array."""
    return [[place, list(view.shape), str(view.dtype)] for place, view in views]


def plain_values(state: State) -> dict[str, Any]:
    """Return its values that are not objects."""
    if not state._objects:
        return state._values
    return {name: value for name, value in state._values.items() if name not in state._objects}


def without_arrays(value: Any) -> Any:
    """Return a tree with None in the place of each array, in plain dictionaries, lists and tuples."""
    if isinstance(value, Mapping):
        return {plain_key(key): without_arrays(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return sequence(() if isinstance(value, tuple) else [], [without_arrays(one) for one in value])
    return None if is_array(value) else value


def _has_arrays(value: Any) -> bool:
    return any(is_array(leaf) for _, leaf in leaves(value))


def loaded(value: Any, arrays: Iterator[Array], small: Any, seen: set[int]) -> Any:
    """Load a value in the order of `leaves`. Containers without arrays are replaced, whatever their new length.

    ``seen``: ids of the dictionaries and arrays that were loaded already, under other names.
    """
    if not _has_arrays(value):
        return _of_kind(value, small)
    if isinstance(value, Mapping):
        return _loaded_mapping(value, arrays, small, seen)
    if isinstance(value, (list, tuple)):
        held = [
            loaded(one, arrays, small[place] if place < len(small) else None, seen) for place, one in enumerate(value)
        ]
        return sequence(value, [*held[: len(small)], *small[len(held) :]])
    return _written(value, next(arrays), seen)


def _loaded_mapping(value: Mapping[Any, Any], arrays: Iterator[Array], small: dict[Any, Any], seen: set[int]) -> Any:
    """Load a mapping. Entries under keys of one side only hold no arrays: the arrays of both have the same paths."""
    plain = {plain_key(key): key for key in sorted(value, key=order_of)}
    found = {key: loaded(value[key], arrays, small[one], seen) for one, key in plain.items() if one in small}
    found |= {one: what for one, what in small.items() if one not in plain}
    # One dictionary under two names, as of an optimizer whose first state is the model itself, has two contents by now.
    is_other = id(value) in seen and any(found.get(key) is not one for key, one in value.items())
    if not isinstance(value, dict) or is_other:
        return type(value)(found)  # type: ignore[call-arg]
    seen.add(id(value))
    # In place: the program may hold this very dictionary, as torch's optimizers do.
    for key in value.keys() - found.keys():
        del value[key]
    value.update(found)
    return value


def _of_kind(value: Any, small: Any) -> Any:
    """Convert received lists to tuples where ``value`` has tuples."""
    if isinstance(value, Mapping) and isinstance(small, dict):
        return {key: _of_kind(value.get(key), one) for key, one in small.items()}
    if isinstance(value, (list, tuple)) and isinstance(small, (list, tuple)):
        items = [_of_kind(value[place] if place < len(value) else None, one) for place, one in enumerate(small)]
        # Checkpoints of earlier versions have lists for tuples.
        return sequence(value if isinstance(value, tuple) and len(value) == len(small) else small, items)
    return small


def _place_of(array: Any, *, is_own: bool) -> Array:
    view = adapt(array)
    if not is_own:
        return np.empty(view.size, view.dtype)
    try:
        return adapt_out(array, view.shape, view.dtype).flat
    except ConfigError:
        return np.empty(view.size, view.dtype)


def _written(array: Any, now: Array, seen: set[int]) -> Any:
    """Write new contents to an array; returns it, or a new one of its kind if it is not writeable, or has others."""
    view = adapt(array)
    if id(array) in seen:
        # One array under two names, as before its owners have parted: it stays one where the contents are equal.
        is_same = view.flat.tobytes() == now.tobytes()
        return array if is_same else view.restore(np.array(now, view.dtype).reshape(-1))
    seen.add(id(array))
    try:
        out = adapt_out(array, view.shape, view.dtype)
    except ConfigError:
        return view.restore(np.array(now, view.dtype).reshape(-1))
    # What was received into ``places_of`` is there already.
    if not same_memory(out.flat, now):
        out.flat[:] = now.reshape(-1)
    return out.finish()
