"""What was decided, in words and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_SHOWN = 16
"""Of a sequence, in the log."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that was decided, and why.

    Attributes:
        step: number of the step at whose end it was.
        policy: name of the policy.
        what: in words.
        evidence: the numbers behind it.
    """

    step: int
    policy: str
    what: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The evidence in words."""
        return ", ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in self.evidence.items())

    def __str__(self) -> str:
        return f"step {self.step}: {self.policy}: {self.what}" + (f" ({self.why})" if self.why else "")


def shown(value: Any) -> str:
    """A value, or several, as the log has it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        left_out = len(value) - MAX_SHOWN
        return "[" + ", ".join(map(shown, value[:MAX_SHOWN])) + (f", {left_out} more]" if left_out > 0 else "]")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    return str(value)
