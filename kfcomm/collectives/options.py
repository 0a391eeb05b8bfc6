"""Options of one call of a verb: built where the public verb is called, and passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kfcomm.collectives.group import checked_priority
from kfcomm.common.sizes import seconds_of
from kfcomm.types import Seconds


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of a call; each field is described at ``Verbs.all_reduce``.

    Attributes:
        op, root: arguments of the verb; None in verbs without.
        out, timeout, priority, wire_dtype, stream, weight, shared: of the call, as its caller gave them.
        is_step: the call is a step of another verb, whose name it uses: its plan is not cached under that name.
    """

    op: Any = None
    root: Any = None
    out: Any = None
    timeout: Seconds | None = None
    priority: int = 0
    wire_dtype: Any = None
    stream: Any = None
    weight: float | None = None
    shared: bool = False
    is_step: bool = False

    @property
    def timeout_s(self) -> float | None:
        """The timeout in seconds; None for the communicator's."""
        return seconds_of(self.timeout)

    def checked(self) -> Self:
        """The same options, with a plain priority.

        Raises:
            ConfigError: the timeout or the priority is not valid.
        """
        seconds_of(self.timeout)
        priority = checked_priority(self.priority)
        return self if priority is self.priority else replace(self, priority=priority)

    def but(self, **changes: Any) -> Self:
        """The same options with these changed."""
        return replace(self, **changes)

    def first_given(self, *names: str) -> str | None:
        """The first of these options that the caller has given."""
        return next((name for name in names if getattr(self, name) not in (None, False)), None)


PLAIN: Final = CallOptions()
"""Options of a call without any."""
STEP: Final = CallOptions(is_step=True)
