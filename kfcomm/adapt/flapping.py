"""One rule against flapping, for all policies and whatever they change. Pure.

A change may be taken back, at once if need be. But what was taken back is not set again within ``rest`` steps: two
policies that undo each other's choice, or one that is at a threshold, would cost more than either choice. So a value
goes to and fro once in ``rest`` steps. All ranks know the same changes, so they refuse alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class RecentChanges:
    """Last change of each subject.

    Args:
        rest: number of steps for which a value that was taken back is not set again; 0 for no such rule.
    """

    def __init__(self, rest: int) -> None:
        self.rest = rest
        # By subject: step, value before, value after, and whether that took a change back within the time of rest.
        self._last: dict[str, tuple[int, Any, Any, bool]] = {}

    def note(self, subject: str, step: int, before: Any, after: Any) -> None:
        """Note a change; nothing if the values are the same."""
        if before != after:
            is_back = self._steps_since(subject, after, step) is not None
            self._last[subject] = step, before, after, is_back

    def forget(self, subject: str) -> None:
        """Forget the change of a subject, which was undone for a policy that has failed."""
        self._last.pop(subject, None)

    def steps_since(self, subject: str, value: Any, step: int) -> int | None:
        """Number of steps since this value was taken back, if it is too soon to set it again; else None."""
        return self._steps_since(subject, value, step) if self._last.get(subject, (0, 0, 0, False))[3] else None

    def _steps_since(self, subject: str, value: Any, step: int) -> int | None:
        if subject not in self._last:
            return None
        changed, before, _, _ = self._last[subject]
        return step - changed if value == before and step - changed < self.rest else None

    @property
    def state(self) -> dict[str, list[Any]]:
        """Changes by subject; msgpack and JSON can carry them."""
        return {subject: list(one) for subject, one in self._last.items()}

    @state.setter
    def state(self, state: Mapping[str, Sequence[Any]]) -> None:
        self._last = {subject: (one[0], one[1], one[2], one[3]) for subject, one in state.items()}
