"""State of several parts as one, for ``kfcomm.elastic.State``.

Each part has the two methods of torch, and perhaps ``merging``: see "State of objects" in the reference of
``kfcomm.elastic``. Their states travel with keys such as ``algorithm/center``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class StatefulPart(Protocol):
    """Object with state."""

    def state_dict(self) -> dict[str, Any]:
        """The state: arrays and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Continue from a state."""


class CompositeState:
    """Parts with state, as one. A part that a state does not have stays as it is."""

    def __init__(self, parts: Mapping[str, StatefulPart]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """States of all parts."""
        return {f"{name}/{key}": one for name, part in self._parts.items() for key, one in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load each part."""
        for name, part in self._parts.items():
            own = {key.removeprefix(f"{name}/"): one for key, one in state.items() if key.startswith(f"{name}/")}
            if own:
                part.load_state_dict(own)

    def merging(self) -> dict[str, str]:
        """Conversions of the values that differ between ranks."""
        found = dict[str, str]()
        for name, part in self._parts.items():
            merging: Callable[[], Mapping[str, str]] = getattr(part, "merging", dict)
            found |= {f"{name}/{key}": how for key, how in merging().items()}
        return found
