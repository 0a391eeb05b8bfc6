"""Trees of arrays, as models and gradients are: dicts, lists and tuples, by the names of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kfcomm.arrays import adapt
from kfcomm.arrays.kinds import is_array_type
from kfcomm.errors import ConfigError

Tree: TypeAlias = Any
"""An array, or a dict, list or tuple of trees."""

ALONE = "x"
"""The name of an array that is a tree by itself."""


def leaves(tree: Tree) -> dict[str, Any]:
    """Return the arrays of a tree, at least one, by name: keys and positions on the way to each, joined by slashes."""
    found: dict[str, Any] = {}
    _collect(tree, "", found)
    if not found:
        raise ConfigError("a tree without arrays has nothing to agree on")
    return found


def rebuilt(tree: Tree, arrays: Mapping[str, Any], path: str = "") -> Tree:
    """Rebuild a tree like ``tree`` with other arrays, by the names of ``leaves``."""
    children = _children(tree)
    if children is None:
        return arrays[path or ALONE]
    made = {key: rebuilt(child, arrays, _below(path, key)) for key, child in children}
    if isinstance(tree, Mapping):
        return made
    parts = list(made.values())
    if isinstance(tree, tuple):
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return parts


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Map ``function`` over the arrays of ``tree`` and the same ones of ``others``; return a tree like ``tree``."""
    first, rest = leaves(tree), [leaves(other) for other in others]
    for other in rest:
        if other.keys() != first.keys():
            unlike = ", ".join(sorted(other.keys() ^ first.keys())[:4])
            raise ConfigError(f"the trees have different arrays: {unlike}")
    return rebuilt(tree, {name: function(x, *(other[name] for other in rest)) for name, x in first.items()})


def copied(tree: Tree) -> Tree:
    """Copy a tree: programs update models in place, and kept models must not follow."""
    return mapped(lambda x: 1 * x, tree)


def _collect(tree: Tree, path: str, found: dict[str, Any]) -> None:
    children = _children(tree)
    if children is None:
        if (path or ALONE) in found:
            raise ConfigError(f"two arrays of a tree have the name {path!r}")
        found[path or ALONE] = tree
        return
    for key, child in children:
        _collect(child, _below(path, key), found)


def _children(tree: Tree) -> list[tuple[Any, Any]] | None:
    """Keys and subtrees; None for an array."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    return None


def _below(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def is_array(x: Any) -> bool:
    """Whether a leaf of a tree is an array; else it is a value."""
    kind: Any = type(x)
    return is_array_type(kind)


def converted(own: Any, given: Any, what: str) -> Any:
    """Copy a part of a state, with arrays of the kinds, and containers of the classes, of this rank's own part.

    Raises:
        ConfigError: the arrays have other names, shapes or dtypes than this rank's own.
    """
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    _collect(given, "", theirs)
    if own is None or given is None:
        return None if given is None else mapped(lambda x: 1 * x if is_array(x) else x, given)
    _collect(own, "", mine)
    if mine.keys() != theirs.keys():
        unlike = ", ".join(sorted(mine.keys() ^ theirs.keys())[:4])
        raise ConfigError(f"{what}: arrays of one side only: {unlike}")
    return rebuilt(own, {name: _alike(x, theirs[name], f"{what}, array {name!r}") for name, x in mine.items()})


def _alike(own: Any, given: Any, what: str) -> Any:
    if not is_array(own):
        return given if own is None or given is None else type(own)(given)
    if type(own) is type(given) and own.shape == given.shape and own.dtype == given.dtype:
        return 1 * given
    mine, theirs = adapt(own), adapt(given)
    if (mine.shape, mine.flat.dtype) != (theirs.shape, theirs.flat.dtype):
        raise ConfigError(f"{what}: expected {mine.flat.dtype} {mine.shape}, got {theirs.flat.dtype} {theirs.shape}")
    return mine.kind.restore(theirs.flat.copy().reshape(theirs.shape))
