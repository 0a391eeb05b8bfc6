"""Arrays in a tree of dicts, lists and tuples, and the same arrays by name. Pure.

A model is a tree in some frameworks, a mapping or a list in others; collectives take a mapping from names to arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kfcomm.errors import ConfigError

Tree: TypeAlias = Any
"""An array, or a dict, list or tuple of trees."""

ALONE = "x"
"""The name of an array that is a tree by itself."""


def leaves(tree: Tree) -> dict[str, Any]:
    """The arrays of a tree by name: keys and positions on the way to each, joined by slashes.

    Raises:
        ConfigError: the tree has no arrays, or two have one name.
    """
    found: dict[str, Any] = {}
    _collect(tree, "", found)
    if not found:
        raise ConfigError("a tree without arrays has nothing to agree on")
    return found


def rebuilt(tree: Tree, arrays: Mapping[str, Any]) -> Tree:
    """A tree like ``tree`` of other arrays, given by the names that ``leaves`` has for its own."""
    return _rebuilt(tree, "", arrays)


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """A tree like ``tree`` of what ``function`` gives for each array, and for those of ``others`` with its name.

    Raises:
        ConfigError: a tree has no array, or the trees have arrays of different names.
    """
    first, rest = leaves(tree), [leaves(other) for other in others]
    for other in rest:
        if other.keys() != first.keys():
            unlike = ", ".join(sorted(other.keys() ^ first.keys())[:4])
            raise ConfigError(f"the trees have different arrays: {unlike}")
    return rebuilt(tree, {name: function(x, *(other[name] for other in rest)) for name, x in first.items()})


def copied(tree: Tree) -> Tree:
    """A tree of copies: programs update models in place, and what is kept beside these must not follow."""
    return mapped(lambda x: 1 * x, tree)


def _collect(tree: Tree, path: str, found: dict[str, Any]) -> None:
    children = _children(tree)
    if children is None:
        if (path or ALONE) in found:
            raise ConfigError(f"two arrays of a tree have the name {path!r}")
        found[path or ALONE] = tree
        return
    for key, child in children:
        _collect(child, f"{path}/{key}" if path else str(key), found)


def _rebuilt(tree: Tree, path: str, arrays: Mapping[str, Any]) -> Tree:
    children = _children(tree)
    if children is None:
        return arrays[path or ALONE]
    made = {key: _rebuilt(child, f"{path}/{key}" if path else str(key), arrays) for key, child in children}
    if isinstance(tree, Mapping):
        return made
    parts = list(made.values())
    if isinstance(tree, tuple):
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return parts


def _children(tree: Tree) -> list[tuple[Any, Any]] | None:
    """Keys and subtrees; None for an array."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    return None
