"""Calls in the launch order of their group: each is launched when its turn has come and all ranks know it."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kfcomm.core.launch_order import ASK, LAUNCH, LEADER, TELL, Effects, LaunchOrder, launch_order

if TYPE_CHECKING:
    from kfcomm.collectives.on_device.background import Timers
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.collectives.on_device.formation import Channel
    from kfcomm.core.collective import GroupView
    from kfcomm.transports.reactor import Reactor


@dataclass(frozen=True, slots=True)
class OrderWays:
    """Functions that carry out what follows from the order."""

    may_launch: Callable[[], bool]  # now
    launch: Callable[[DeviceCall], None]
    say: Callable[[Any, int | None], None]  # to one rank; None for all others, which only the leader does
    fail: Callable[[str], None]  # ends the formation, for this reason


class CallOrder:
    """This rank's part of the order of one group. A new formation begins with a new order.

    ``follows``: ranks follow the order once it is known; else the leader sends it each time.

    Attributes:
        waiting: calls in the order that are not launched.
        known: the order itself, which is not used in a group of one rank.
    """

    def __init__(
        self, view: GroupView, channel: Channel, timers: Timers, reactor: Reactor, ways: OrderWays, *, follows: bool
    ) -> None:
        self.waiting: dict[DeviceCall, None] = {}
        self._view = view
        self._channel = channel
        self._timers = timers
        self._reactor = reactor
        self._ways = ways
        self._follows = follows
        self._due: deque[tuple[DeviceCall, int]] = deque()  # whose turn has come, and the news to hear before
        self.known = self._new()

    def renew(self) -> None:
        """Forget what was learned: another formation begins."""
        self.known = self._new()

    def arrive(self, call: DeviceCall) -> None:
        """Launch a call, now or in its turn."""
        self.waiting[call] = None
        if self._view.size == 1:  # any order will do
            self._due.append((call, -1))
            self.launch_due()
            return
        effects: Effects = []
        self.known.arrived(key_of(call), call, self._reactor.time(), effects)
        self._perform(effects)

    def withdraw(self, call: DeviceCall) -> bool:
        """Withdraw a call that has failed; False, with nothing done, if its turn has come."""
        if any(one is call for one, _ in self._due):
            return False
        del self.waiting[call]
        self.known.withdraw(key_of(call), call)
        return True

    def hear(self, sender: int, body: Any) -> None:
        """Handle what another rank says about the order."""
        effects: Effects = []
        self.known.received(sender, body, self._reactor.time(), effects)
        self._perform(effects)

    def stop(self) -> list[DeviceCall]:
        """Launch nothing more; return the calls that wait."""
        self._timers.set(self._on_time, None)
        self._due.clear()
        waiting, self.waiting = self.waiting, {}
        return list(waiting)

    def launch_due(self) -> None:
        """Launch the calls whose turn has come, once all ranks have heard that."""
        # After a launch its caller may block this loop by waiting for the device, which waits for the other ranks:
        # they must know the order by then.
        while self._due and self._ways.may_launch() and self._channel.is_heard(self._due[0][1]):
            call, _ = self._due.popleft()
            del self.waiting[call]
            self._ways.launch(call)

    def _perform(self, effects: Effects) -> None:
        unheard = -1
        for effect in effects:
            tag = effect[0]
            if tag == LAUNCH:
                self._due.append((effect[1], unheard))
            elif tag == TELL:
                unheard = self._channel.batch
                self._ways.say(effect[1], None)
            elif tag == ASK:
                self._ways.say(effect[1], LEADER)
            else:
                self._ways.fail(f"{self._view.called(effect[1])} sent {effect[2]}")
        self.launch_due()
        self._timers.set(self._on_time, self.known.deadline_s())

    def _on_time(self) -> None:
        effects: Effects = []
        self.known.handle_timer(self._reactor.time(), effects)
        self._perform(effects)

    def _new(self) -> LaunchOrder:
        return launch_order(self._view.rank, self._view.size, follows=self._follows)


def key_of(call: DeviceCall) -> str:
    """Key of a call in the launch order."""
    return order_key(call.key, call.signature, call.memo)


def order_key(key: str, signature: Iterable[Any], memo: dict[str, Any]) -> str:
    """Key in the launch order: the name and a digest of the signature, so unlike calls never launch together."""
    made: str | None = memo.get("")
    if made is None:
        digest = hashlib.blake2b(repr(tuple(signature)).encode(), digest_size=8).hexdigest()
        made = memo[""] = f"{key}\0{digest}"
    return made
