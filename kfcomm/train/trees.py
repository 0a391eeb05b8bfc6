"""Trees of arrays, as models and gradients are: dicts, lists and tuples, by the names of their arrays."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.arrays.kinds import is_array_type
from kfcomm.arrays.trees import Tree, collect, leaves, rebuilt
from kfcomm.errors import ConfigError

__all__ = ["Tree", "converted", "copied", "is_array", "leaves", "mapped", "rebuilt", "state_digests"]


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


def is_array(x: Any) -> bool:
    """Whether a leaf of a tree is an array; else it is a value."""
    kind: Any = type(x)
    return is_array_type(kind)


def state_digests(objects: Mapping[str, Any], ways: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of the state of each object, without what differs between ranks: the keys of ``ways``.

    Of values and NumPy arrays; the digest of a state with other arrays is unlike all others.
    """
    found = {}
    for key, one in objects.items():
        state = leaves({k: value for k, value in one.state_dict().items() if f"{key}/{k}" not in ways})
        said = [f"{name}: {_said(x)}" for name, x in sorted(state.items())]
        found[key] = hashlib.blake2b("; ".join(said).encode(), digest_size=16).hexdigest()
    return found


def _said(x: Any) -> str:
    if isinstance(x, (np.ndarray, np.generic)):
        return f"{x.dtype} {x.shape} {x.tobytes().hex()}"
    if is_array(x):
        return secrets.token_hex(16)
    # 8 and 8.0 are one number: a state that was handed over has the types of another rank.
    return repr(float(x) if isinstance(x, (int, float)) else x)


def converted(own: Any, given: Any, what: str) -> Any:
    """Copy a part of a state, with arrays of the kinds, and containers of the classes, of this rank's own part.

    Raises:
        ConfigError: the arrays have other names, shapes or dtypes than this rank's own.
    """
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    collect(given, "", theirs)
    if own is None or given is None:
        return None if given is None else mapped(lambda x: 1 * x if is_array(x) else x, given)
    collect(own, "", mine)
    if mine.keys() != theirs.keys():
        unlike = ", ".join(sorted(mine.keys() ^ theirs.keys())[:4])
        raise ConfigError(f"{what}: arrays of one side only: {unlike}")
    return rebuilt(own, {name: _alike(x, theirs[name], f"{what}, array {name!r}") for name, x in mine.items()})


def _alike(own: Any, given: Any, what: str) -> Any:
    if not is_array(own):
        return given if own is None or given is None else type(own)(given)
    if type(own) is type(given) and own.shape == given.shape and own.dtype == given.dtype:
        # A state that was handed over is in host memory.
        return given.to(own.device, copy=True) if hasattr(own, "new_tensor") else 1 * given
    mine, theirs = adapt(own), adapt(given)
    if (mine.shape, mine.flat.dtype) != (theirs.shape, theirs.flat.dtype):
        raise ConfigError(f"{what}: expected {mine.flat.dtype} {mine.shape}, got {theirs.flat.dtype} {theirs.shape}")
    return mine.kind.restore(theirs.flat.copy().reshape(theirs.shape))
