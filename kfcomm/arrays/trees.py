"""Trees of arrays, as models and gradients are: dicts, lists and tuples, by the names of their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from kfcomm.errors import ConfigError

Tree: TypeAlias = Any
"""An array, or a dict, list or tuple of trees."""

ALONE = "x"
"""The name of an array that is a tree by itself."""


def leaves(tree: Tree) -> dict[str, Any]:
    """Return the arrays of a tree, at least one, by name: keys and positions on the way to each, joined by slashes."""
    found: dict[str, Any] = {}
    collect(tree, "", found)
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


def collect(tree: Tree, path: str, found: dict[str, Any]) -> None:
    """Add the arrays of a tree below a path to ``found``."""
    children = _children(tree)
    if children is None:
        if (path or ALONE) in found:
            raise ConfigError(f"two arrays of a tree have the name {path!r}")
        found[path or ALONE] = tree
        return
    for key, child in children:
        collect(child, _below(path, key), found)


def _children(tree: Tree) -> list[tuple[Any, Any]] | None:
    """Keys and subtrees; None for an array."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        return list(enumerate(tree))
    return None


def _below(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)
