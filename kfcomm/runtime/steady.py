"""Copies of what another thread changes: for diagnosis and monitoring, which never stop the one who works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TRIES = 100
"""How often a copy of something that other threads change is tried; each takes microseconds."""


def steady(copy: Callable[[], T]) -> T:
    """What ``copy`` returns, tried again while what it reads changes under its hands."""
    for _ in range(TRIES):
        try:
            return copy()
        except RuntimeError:  # changed size during iteration
            continue
    return copy()
