"""Events of one rank, and the protocol of those who observe them.

Statistics (``meter``), the log of recent events (``recorder``), the load (``load``) and timelines
(``kfcomm.monitor.timeline``) are observers. An observer returns nothing and cannot change what the engine does.

``Engine.observers`` is None unless one was attached, and each event costs one test of that then. Statistics and the
recorder are not in it: completions reach them in batches (see ``Recorder.settle``), which costs a third; the rarer
events reach all of them. Bytes are counted by the links and slots that move them (see ``traffic``), since an event per
chunk would cost more than the count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView, Key
    from kfcomm.engine.direct import InSlot
    from kfcomm.engine.operation import Operation


class Observer:
    """Base of observers: ignores every event. No method may raise, and none but ``close`` may wait.

    Attributes:
        sees_chunks: it wants the chunks of every collective, so no collective may use a slot meanwhile.
        outlives_epoch: it goes with the process into the next epoch.
    """

    __slots__ = ()
    sees_chunks: ClassVar = False
    outlives_epoch: ClassVar = False

    # ---------------------------------------------------------------- collectives

    def posted(self, operation: Operation) -> None:
        """A collective has begun. Called before anything of it is sent or folded."""

    def sent(self, peer: int, operation: Operation, nbytes: int) -> None:
        """A chunk was given to the link to ``peer`` (world rank), which sends it when it can."""

    def first_byte(self, peer: int) -> None:
        """A large chunk from ``peer`` has begun to arrive; ``last_byte`` follows."""

    def last_byte(self, peer: int, key: Key, seq: int, nbytes: int) -> None:
        """A chunk from ``peer`` is here, of use ``seq`` of ``key``, which may not be posted yet."""

    def done(self, operation: Operation | InSlot, *, is_last: bool) -> None:
        """A collective is complete; ``is_last``: no other is in flight."""

    def failed(self, operation: Operation, reason: str, *, is_last: bool) -> None:
        """A collective has failed; ``is_last``: no other is in flight."""

    def refused(self, group: GroupView, name: str, reason: str, *, is_local: bool) -> None:
        """A call failed before it had a number; ``is_local``: by a check of its own arguments."""

    # ---------------------------------------------------------------- the world

    def lost(self, rank: int, reason: str) -> None:
        """The process of a rank is gone."""

    def left(self, rank: int) -> None:
        """A rank is leaving: this is the last that can be asked of it."""

    def swapped(self, strategy: str, generation: int, size: int, error: BaseException | None) -> None:
        """The strategy of a group of ``size`` ranks was changed, or (``error``) was not."""

    def joined(self, epoch: int, rank: int, size: int) -> None:
        """This process is in the next epoch."""

    # ---------------------------------------------------------------- what the program says

    def instant(self, name: str, /, **details: Any) -> None:
        """Something happened: a policy has decided. Any thread may say so.

        Args:
            name: what, in a word or two; the same for the same kind of thing.
            **details: values that are not changed any more; what JSON does not know is shown in words.
        """

    def counter(self, name: str, unit: str, value: float) -> None:
        """A quantity that goes up and down has this value now. Any thread may say so."""

    def span(self, name: str, since_ns: int, until_ns: int, /, **details: Any) -> None:
        """The program did this, by the monotonic clock. Any thread may say so; spans of one rank do not overlap."""

    # ---------------------------------------------------------------- its end

    def forked(self) -> None:
        """This process is a child of the observed one: it must not write what its parent writes."""

    async def close(self) -> None:
        """Write what is left. Bounded."""
