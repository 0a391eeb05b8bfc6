"""What records a timeline of a rank, as the runtime sees it: a hook that is None unless somebody asked for one.

The engine and what is above it tell a tracer what happens, as it happens. A tracer returns nothing, and cannot change
what the runtime does. Callers first check that there is one (``if engine.tracer is not None``), so a program without a
timeline pays for that check only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kfcomm.core.collective import Key
    from kfcomm.engine.operation import Operation


class Tracer(Protocol):
    """Records what happens on one rank. No method raises, and none but ``close`` waits."""

    def posted(self, operation: Operation) -> None:
        """A collective has begun. Called before anything of it is sent or folded."""

    def ended(self, operation: Operation, reason: str = "") -> None:
        """It is over: complete, or failed for this reason."""

    def sent(self, peer: int, operation: Operation, nbytes: int) -> None:
        """A chunk was given to the link to ``peer`` (world rank), which sends it when it can."""

    def arriving(self, peer: int) -> None:
        """A large chunk from ``peer`` has begun to arrive; ``arrived`` follows."""

    def arrived(self, peer: int, key: Key, seq: int, nbytes: int) -> None:
        """A chunk from ``peer`` is here, of use ``seq`` of ``key``, which may not be posted yet."""

    def instant(self, name: str, /, **details: Any) -> None:
        """Something happened: a strategy was changed, a policy has decided. Any thread may say so.

        Args:
            name: what, in a word or two; the same for the same kind of thing.
            **details: values that are not changed any more; what JSON does not know is shown in words.
        """

    def counter(self, name: str, unit: str, value: float) -> None:
        """A quantity that goes up and down has this value now. Any thread may say so."""

    def span(self, name: str, since_ns: int, until_ns: int, /, **details: Any) -> None:
        """The program did this, by the monotonic clock. Any thread may say so; spans of one rank do not overlap."""

    def left(self, peer: int) -> None:
        """A rank is leaving: this is the last that can be asked of it."""

    def forked(self) -> None:
        """This process is a child of the one that records: it must not write what its parent writes."""

    async def close(self) -> None:
        """Write what is left. Bounded."""
