"""Measurement of the links of a group for ``auto``, and the right moment for it: see `improving`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kfcomm.core.collective import GroupView
from kfcomm.errors import KfcommError
from kfcomm.types import Layout, Rates

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.probe import Prober
    from kfcomm.probe.passive import SeenLink
    from kfcomm.transports.reactor import Timer

MOST_HOSTS: Final = 64
"""Of a group that improves itself: pairs of hosts measure one after the other."""
MOST_RANKS: Final = 1024
"""Likewise: the first rank sends to all others."""
NBYTES, ROUNDS, ENOUGH_S, ENOUGH_NBYTES = 1 << 16, 1, 8e-3, 1 << 22
"""Of the messages that measure; see `kfcomm.probe.pairs`."""
_USUAL_RATE: Final = 5e7
_GROWN: Final = 3.5
"""Messages grow fourfold, so the last one takes up to four times as long as is enough."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of the look at the links, in time and cost.

    Attributes:
        tick_s: between two looks at whether the time has come.
        least_uses: calls before the first.
        share: what measuring may take of the time for which the program has made calls; it is done once.
        within_s: for ranks to answer while others hold their calls; twice the longest call's time, if that is more.
        most_within_s: the most that this can be.
        patience_s: for ranks to answer while none does.
        most_times: that it is begun, if ranks do not answer in time.
        worth: how many times as fast a change has to be, by the model.
    """

    tick_s: float = 0.25
    least_uses: int = 8
    share: float = 0.1
    within_s: float = 2.0
    most_within_s: float = 30.0
    patience_s: float = 60.0
    most_times: int = 4
    worth: float = 1.05


PACE = Pace()


class Patience:
    """Waits until the links of a group may be measured: for the first time, or once more. On the first rank.

    Args:
        group: whose calls count.
        pace: see `Pace`.
        begin: called when the time has come.
    """

    def __init__(self, group: Group, pace: Pace, begin: Callable[[], None]) -> None:
        self._group = group
        self._pace = pace
        self._begin = begin
        self._times = 0
        self._uses = 0
        self._busy_s = self._looked_s = self._longest_s = 0.0
        self._timer: Timer | None = None

    @property
    def within_s(self) -> float:
        """Time for ranks to answer: an answer may be behind the data of the calls under way."""
        return min(max(self._pace.within_s, 2 * self._longest_s), self._pace.most_within_s)

    def start(self) -> None:
        """Begin to wait, four times as long as before, unless it was begun often enough."""
        if self._times < self._pace.most_times:
            self._times += 1
            self._busy_s, self._looked_s = 0.0, self._group.engine.reactor.time()
            self._longest_s = 0.0
            self._wait()

    def stop(self) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._group.engine.reactor.call_later(self._pace.tick_s, self._look)

    def _look(self) -> None:
        now_s, uses = self._group.engine.reactor.time(), self._group.num_uses
        begun_s = self._group.oldest_s()
        if uses > self._uses or begun_s is not None:
            self._busy_s += now_s - self._looked_s
        if begun_s is not None:
            self._longest_s = max(self._longest_s, now_s - begun_s)
        self._uses, self._looked_s = uses, now_s
        due_s = survey_s(self._group) * 4 ** (self._times - 1) / self._pace.share
        if uses >= self._pace.least_uses and self._busy_s >= due_s:
            self._timer = None
            self._begin()
        else:
            self._wait()


def survey_s(group: Group) -> float:
    """About how long the links of a group take to be measured, by those of this rank."""
    hosts = group.layout.num_hosts
    # A port that all others send to shows each link a part of what it carries alone; one that few do, most of it.
    slowest = min((link.rate * max(1.0, (hosts - 1) / 2) for link in seen_links(group)), default=_USUAL_RATE)
    # Either the first message takes long enough, or several that grow take up to so much together.
    one_way_s = max(_GROWN * ENOUGH_S, NBYTES / slowest)
    return (hosts - 1 + hosts % 2) * 2 * one_way_s


def seen_links(group: Group) -> list[SeenLink]:
    """Links of this rank to other hosts, as the kernel has seen them."""
    from kfcomm.probe.passive import seen_links as seen

    return seen(group.engine.links.traffic, group.view, group.layout)


class LinkProber:
    """Measures the links between the hosts of a group, by the first rank of each."""

    def __init__(self, group: Group, pace: Pace) -> None:
        self._group = group
        self._pace = pace
        self._view: GroupView | None = None
        self._prober: Prober | None = None

    async def run(self, within_s: float) -> Rates | None:
        """Measure; None on a rank that is not the first of its host, and where it fails."""
        from kfcomm.probe.pairs import Enough

        masters = self._group.layout.masters
        if self._group.view.rank not in masters:
            return None
        if self._prober is None:
            self._prober = self._made(masters)
        try:
            probe = await self._prober.run(NBYTES, ROUNDS, within_s, Enough(ENOUGH_S, ENOUGH_NBYTES))
        except KfcommError:
            return None  # the first rank knows it, too
        return probe.measured_layout().costs.rates

    def group_ids(self) -> set[bytes]:
        """Groups that were made for it."""
        if self._view is None or self._prober is None:
            return set()
        return {self._view.id, *self._prober.group_ids()}

    def _made(self, masters: tuple[int, ...]) -> Prober:
        from kfcomm.probe import Prober

        group, view = self._group, self._group.view
        identity = hashlib.blake2b(view.id, digest_size=16, person=b"hosts").digest()
        members = tuple(view.members[rank] for rank in masters)
        self._view = GroupView(identity, members, masters.index(view.rank))
        layout = Layout(tuple(range(len(masters))), group.layout.num_cpus)
        return Prober(group.engine, self._view, layout, group.timeout_s)
