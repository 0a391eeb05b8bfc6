"""Processes of the ranks of this host: forwarded signals, the end with its grace, and silence."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

from kfcomm.common.sizes import ranks_in_words
from kfcomm.launch.exit_reports import Blame, ExitReports
from kfcomm.launch.process import Child
from kfcomm.launch.signals import PASSED_ON

_LOOKS = 4
"""Number of checks for signs of life within ``lost_after_s``."""
RELEASED_WITHIN_S = 60.0
"""Time for released ranks to end after the job; stopped ranks get none."""


@dataclass(slots=True)
class LocalRanks:
    """Processes of this host, by uid.

    Attributes:
        grace_s: seconds between asking and killing.
        children: all processes that were ever started here.
        ended: return codes of ended ones.
        reports: receives their exit reports and signs of life.
        silent: ranks without a sign of life for too long.
        dismissed: processes that were to start or waiting, and are not wanted any more.
        released: ranks that the others of an elastic job have released; they end by themselves.
    """

    grace_s: float
    children: dict[int, Child] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    reports: ExitReports = field(init=False)
    silent: set[int] = field(default_factory=set)
    dismissed: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    _ran_s: dict[int, float] = field(default_factory=dict)
    _killer: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None

    @property
    def living(self) -> set[int]:
        """Uids of the processes that have not ended."""
        return self.children.keys() - self.ended.keys()

    def send(self, number: int, births: Iterable[int]) -> None:
        """Send a signal to the process groups of those that live."""
        for birth in self.living.intersection(births):
            self.children[birth].send(number)

    def forward(self, number: int) -> None:
        """Forward a signal that does not end the job; see `signals`."""
        for birth in self.living:
            if number in PASSED_ON:
                self.children[birth].notify(number, self.reports.pids.get(birth))
            else:
                self.children[birth].send(signal.SIGSTOP if number == signal.SIGTSTP else number)

    def end(self, number: int) -> None:
        """Ask all to end; kill them after the grace, or at once the second time."""
        # The timer is never reset: a job that keeps failing while it ends is still killed in time.
        if self._killer is None:
            self.send(number, self.children)
            self._killer = asyncio.get_running_loop().call_later(self.grace_s, self._kill)
        else:
            self._kill()

    def _kill(self) -> None:
        self.send(signal.SIGKILL, self.children)

    def dismiss(self, birth: int) -> None:
        """End a process that is not wanted any more, or will not be started."""
        self.dismissed.add(birth)
        self.send(signal.SIGTERM, [birth])
        self.kill_later(birth)

    def kill_later(self, birth: int) -> None:
        """Kill a process after the grace."""
        asyncio.get_running_loop().call_later(self.grace_s, self.send, signal.SIGKILL, [birth])

    def wait_for_released(self, say: Callable[[str], None]) -> None:
        """Give released ranks time to end, since the job is over."""
        loop = asyncio.get_running_loop()

        def wait_longer() -> None:
            if late := self.released & self.living:
                limit = f"waited for up to {RELEASED_WITHIN_S:g} s"
                say(f"the job is over; {these(late)} released before, and {limit}")
            self._patience = loop.call_later(RELEASED_WITHIN_S, wait_no_longer)

        def wait_no_longer() -> None:
            for birth in self.released:
                self.dismiss(birth)

        if self._patience is None:
            self._patience = loop.call_later(self.grace_s, wait_longer)

    def close(self) -> None:
        """Cancel the timers that are not guarded by the end of the ranks."""
        for timer in (self._killer, self._patience):
            if timer is not None:
                timer.cancel()

    async def silences(self, lost_after_s: float, blame: Blame) -> AsyncIterator[set[int]]:
        """Yield `silent` again and again: processes that are stopped, or have joined and send no sign of life.

        Args:
            lost_after_s: time without a sign of life after which a rank is silent.
            blame: knows which ranks have reported that they leave.
        """
        heard_s = looked_s = monotonic()
        while True:
            await asyncio.sleep(lost_after_s / _LOOKS)
            if monotonic() - looked_s > lost_after_s / 2:
                # This launcher itself was stopped (Ctrl-Z) and has read no signs of life: the time starts again.
                heard_s = monotonic()
            looked_s = monotonic()
            self.reports.drain()
            seen_s = {birth: self._seen_s(birth, looked_s, blame) for birth in self.living}
            self.silent = {birth for birth, at_s in seen_s.items() if max(at_s, heard_s) < looked_s - lost_after_s}
            self.send(signal.SIGKILL, self.silent & self.released)
            yield self.silent

    def _seen_s(self, birth: int, now_s: float, blame: Blame) -> float:
        """Time at which a rank was last seen alive; before it joins and while it leaves, by its process state."""
        if not self.children[birth].is_stopped:
            self._ran_s[birth] = now_s
        ran_s, said = self._ran_s.setdefault(birth, now_s), blame.said(birth)
        has_left = said is not None and said.at_s is not None
        return ran_s if has_left else min(ran_s, self.reports.lived_s.get(birth, ran_s))


def these(births: Iterable[int]) -> str:
    """Ranks as the subject of a sentence: ``ranks 1-2 are``."""
    found = list(births)
    return f"{ranks_in_words(found)} {'is' if len(found) == 1 else 'are'}"
