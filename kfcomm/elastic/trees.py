"""Trees of values in a state: dictionaries, lists and tuples of arrays and plain values.

Arrays have an order that depends on their paths only, so that it is the same on all ranks. A *description* is a tree
without the contents of its arrays, from which a rank with another form rebuilds it: tuples stay tuples, keys stay
numbers, and arrays stay arrays of their library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays.host_kinds import TORCH
from kfcomm.arrays.kinds import is_array_type
from kfcomm.arrays.on_device import is_on_device
from kfcomm.elastic.checks import MappingKey, Path, order_of, plain_key

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

LIBRARIES = {"torch": "Tensor", "jax": "Array", "cupy": "ndarray"}
"""Libraries whose arrays are made again as such, each with the type of its arrays; others become NumPy arrays."""


FLOAT = "float"
"""In the place of a library: a number of Python."""


def is_array(value: Any) -> bool:
    """Whether a value of a tree is an array."""
    kind: Any = type(value)
    return is_array_type(kind)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the values in containers with their paths, mappings in the order of their keys."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=order_of):
            plain = plain_key(key)
            yield from leaves(value[key], (*path, MappingKey(plain) if path else plain))
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            yield from leaves(one, (*path, place))
    else:
        yield path, value


def is_number(value: Any) -> bool:
    """Whether a value of a tree is an array or a floating-point number."""
    return isinstance(value, float) or is_array(value)


def described(value: Any, *, has_numbers: bool = False) -> Any:
    """Describe a tree without the contents of arrays, for ``rebuilt``; msgpack can carry it.

    With ``has_numbers`` floating-point numbers count as arrays.
    """
    # A leaf is [0, value], an array [1, library], a list [2, items], a mapping [3, pairs], sorted by key, and a tuple
    # [4, items].
    if isinstance(value, Mapping):
        keys = sorted(value, key=order_of)
        return [3, [[plain_key(key), described(value[key], has_numbers=has_numbers)] for key in keys]]
    if isinstance(value, (list, tuple)):
        return [4 if isinstance(value, tuple) else 2, [described(one, has_numbers=has_numbers) for one in value]]
    if has_numbers and isinstance(value, float):
        return [1, FLOAT]
    return [1, library_of(value)] if is_array(value) else [0, value]


def rebuilt(tree: Any, arrays: Iterator[Any], like: Any = None, *, as_numpy: bool = False) -> Any:
    """Rebuild the tree of ``described`` with these arrays, in the order of ``leaves``.

    Args:
        tree: description.
        arrays: contents, of the shapes that the arrays had; they belong to the tree from then on.
        like: value of this rank in the same place: its named tuples become named tuples.
        as_numpy: arrays of all libraries become NumPy arrays.
    """
    match tree:
        case [3, pairs]:
            known = like if isinstance(like, Mapping) else {}
            return {key: rebuilt(one, arrays, known.get(key), as_numpy=as_numpy) for key, one in pairs}
        case [2 | 4 as kind, items]:
            beside = like if isinstance(like, (list, tuple)) and len(like) == len(items) else [None] * len(items)
            made = [rebuilt(one, arrays, old, as_numpy=as_numpy) for one, old in zip(items, beside, strict=True)]
            return sequence(like if is_named(like) and beside is like else ((), [])[kind == 2], made)
        case [1, library]:
            return next(arrays) if as_numpy else made_in(library, next(arrays))
        case [_, value]:
            return value


def is_named(value: Any) -> bool:
    """Whether a value is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def sequence(like: Sequence[Any], items: list[Any]) -> Any:
    """Make a list or tuple of the same kind; named tuples, such as optax's states, take their items one by one."""
    kind: Any = type(like)
    return kind(*items) if is_named(like) else kind(items)


def library_of(array: Any) -> str:
    """Return the library of an array; empty for those that are made again as NumPy arrays."""
    for name, kind in LIBRARIES.items():
        type_ = getattr(sys.modules.get(name), kind, None)
        if type_ is not None and isinstance(array, type_):
            return name
    return ""


def made_in(library: str, array: Array) -> Any:
    """Make an array of this library, in host memory where it has such, with these contents."""
    if library in ("", FLOAT):
        return float(array) if library else array
    module = importlib.import_module(library)
    if library == "torch":
        return TORCH.restore(array)
    return module.numpy.asarray(array) if library == "jax" else module.asarray(array)


def on_host(tree: Any) -> Any:
    """Return a tree with arrays in host memory, and with numbers of Python for those of NumPy."""
    if isinstance(tree, Mapping):
        return {key: on_host(one) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return sequence(tree, [on_host(one) for one in tree])
    if isinstance(tree, np.generic):
        return tree.item()
    if library_of(tree) == "torch":
        return tree if tree.device.type == "cpu" else tree.detach().cpu()
    if library_of(tree) == "jax" and is_on_device(tree):
        jax = sys.modules["jax"]
        return jax.device_put(tree, jax.devices("cpu")[0])
    if is_array(tree) and is_on_device(tree):
        return tree.get() if hasattr(tree, "get") else np.asarray(tree)
    return tree
