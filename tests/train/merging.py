"""Conversion of the states of all ranks when their number changes, in plain code beside that of an Elastic."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def converted(states: Sequence[Any], merging: Mapping[str, str], size: int) -> list[Any]:
    """States of ``size`` ranks, from those of the ranks that have one."""
    merged = {key: combined([state[key] for state in states], merging.get(key, "first"), size) for key in states[0]}
    return [copy.deepcopy(merged) for _ in range(size)]


def combined(parts: Sequence[Any], how: str, size: int) -> Any:
    first = parts[0]
    if isinstance(first, dict):
        return {key: combined([one[key] for one in parts], how, size) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(combined(ones, how, size) for ones in zip(*parts, strict=True))
    is_float = isinstance(first, float) or getattr(getattr(first, "dtype", None), "kind", "") == "f"
    if how == "first" or not is_float:
        return copy.deepcopy(first)
    total = sum(np.asarray(one, np.float64) for one in parts) / (len(parts) if how == "mean" else size)
    return float(total) if isinstance(first, float) else total.astype(first.dtype)
