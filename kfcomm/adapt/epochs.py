"""Epochs of a program with policies: marked by hand, or the passes of an ``Elastic``'s sampler.

Hooks are called when the first step of an epoch begins, and when the epoch ends. So a rank that joins within an epoch,
which takes over that it is under way, calls the same hooks as the others from then on. The epochs before, through which
its program runs without steps, have no hooks.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.adapt.guarded import ElasticStep
    from kfcomm.adapt.host import PolicyHost
    from kfcomm.adapt.runner import Hook


class Epochs:
    """Epochs of one rank's program."""

    def __init__(self, host: PolicyHost) -> None:
        self._host = host
        self._is_by_hand = False
        self._is_marked = False  # by hand: one is under way
        self._has_steps = False  # by hand: it has had a step on this rank
        self._sampler: Any = None  # whose passes are the epochs

    def mark_begin(self) -> None:
        """Begin an epoch by hand."""
        if self._is_marked:
            raise ConfigError("an epoch is under way: epochs follow one another")
        self._is_by_hand = self._is_marked = True
        self._has_steps = False

    async def mark_end(self, *, is_complete: bool) -> None:
        """End an epoch by hand."""
        self._is_marked = False
        if is_complete and self._has_steps:
            await self._end()

    async def begin_step(self, step: ElasticStep | None) -> None:
        """Begin and end epochs before a step."""
        progress = self._host.progress
        if self._is_by_hand:
            if self._is_marked:
                self._has_steps = True
                await self._begin(progress.epoch)
            return
        sampler = getattr(step, "sampler", None)
        self._sampler = self._sampler or sampler
        if sampler is None or sampler is not self._sampler:
            return
        if sampler.passes > progress.epoch:
            await self._end()
        elif sampler.passes < progress.epoch:  # returned to an earlier state
            progress.in_epoch = False
        await self._begin(sampler.passes)

    async def close(self) -> None:
        """End the last pass of a sampler, if it is complete."""
        if self._sampler is not None and not self._is_by_hand and self._sampler.passes > self._host.progress.epoch:
            await self._end()

    async def _begin(self, number: int) -> None:
        progress = self._host.progress
        if not progress.in_epoch:
            progress.epoch, progress.in_epoch = number, True
            await self._call("on_epoch_start")

    async def _end(self) -> None:
        progress = self._host.progress
        if progress.in_epoch:
            await self._call("on_epoch_end")
            progress.epoch, progress.in_epoch = progress.epoch + 1, False

    async def _call(self, hook: Hook) -> None:
        if self._host.recorder is not None:
            self._host.recorder.hooked(hook)
        for runner in self._host.runners:
            await runner.call(hook)


class Epoch:
    """One epoch of an ``Adaptation``, marked by hand: ``async with``."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    async def __aenter__(self) -> Self:
        self._epochs.mark_begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._epochs.mark_end(is_complete=error is None)
