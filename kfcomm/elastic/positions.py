"""Positions of samplers and walks in words, for errors and ``repr``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def shown_place(state: Mapping[str, Any]) -> str:
    """Return the position of a sampler in words, given its ``state_dict``."""
    again = f", {len(state['again'])} to be given again" if state["again"] else ""
    aside = f", {len(state['aside'])} set aside" if state["aside"] else ""
    return f"<ElasticSampler: pass {state['passes']}, {state['position']} of {state['length']} given{again}{aside}>"


def shown_walk(name: str | int, state: Mapping[str, Any], passes: int | None, names: list[str] | None) -> str:
    """Return a walk through a sampler in words."""
    return f"{shown_place(state)} (sampler {name!r}), passes={passes}, used_in={names}"
