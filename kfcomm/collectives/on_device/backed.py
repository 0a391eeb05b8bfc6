"""Calls that a backend runs completely on the devices: launched in one order on every rank, posted in any order.

The ranks of a group *form* a backend together, when the first call comes, and launch by `core.launch_order`::

    state       event                                       next        messages
    ----------  ------------------------------------------  ----------  ------------------------------------------
    idle        the leader's first call comes; it makes an  forming     FORM, with the identity, leader to all
                identity
    idle        FORM comes, on any other rank               forming
    forming     all have met (calls are ordered meanwhile)  ready       ORDER: messages of the order, while it is
                                                                        learned or agreed anew
    forming,    a call fails that some rank has launched,   ending      FAILED: see ``formation``
    ready       or the backend does
    ending      launched calls are done, or their time is   idle        ENDED to the leader, which forms anew when
                over, and the backend is ended                          it has that of all, and a call comes

A launch cannot be taken back, and one that only some ranks make blocks every later launch. So such a call fails
together with every unlaunched call; launched calls have a moment to complete, and the next call begins in a new
formation. That is expensive. In normal operation a launch needs no message, once the order is known.

Blocking calls of the backend are made on threads of their own, since they may block for ever if a peer dies.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import StrEnum
from functools import partial
from typing import Any

from kfcomm.arrays.devices import Device, Mark
from kfcomm.collectives.group import Group
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.on_device.background import Timers, in_thread, on_thread
from kfcomm.collectives.on_device.calls import DeviceCall, DevicePath, is_enqueued
from kfcomm.collectives.on_device.formation import Channel, DeviceLauncher, Failures, Use, Ways
from kfcomm.collectives.on_device.launches import Launches
from kfcomm.collectives.on_device.ordering import CallOrder, OrderWays, key_of
from kfcomm.collectives.on_device.repeated import CompiledBatch, CompiledLaunch
from kfcomm.core.collective import name_of
from kfcomm.core.launch_order import LEADER
from kfcomm.errors import CollectiveAborted, TransportError
from kfcomm.transports.base import BackendMaker, CollectiveBackend
from kfcomm.types import override

logger = logging.getLogger("kfcomm")

FORM, ORDER, FAILED, ENDED = range(4)

GRACE_S = 0.5
"""How long launched calls have to complete when another has failed: those that every rank has launched will."""
MEET_S = 5.0
"""How long a backend that is still being formed is waited for then; what comes of it later is ended at once."""
LOOK_EVERY_S = 0.25
DOUBT_S = 1.0
"""From the first sign of a failure of the backend until it counts: a peer that died is better told by its name."""


class BackedState(StrEnum):
    """States of a formation, as in the table above."""

    IDLE = "idle"
    FORMING = "forming"
    READY = "ready"
    ENDING = "ending"
    CLOSED = "closed"


class BackendPath(DevicePath):
    """The calls of one group on this rank. Everything runs on the engine's loop.

    Args:
        group: its ranks.
        device: of this rank.
        maker: of backends.
        mailbox: of the group.
        follows: ranks follow the order once it is known; else the leader sends it each time.

    Attributes:
        state: see the table above.
        formation: how many backends the group has had before.
        backend: that of this formation, once it is ready.
    """

    compiled_type = CompiledLaunch
    batch_type = CompiledBatch

    def __init__(
        self, group: Group, device: Device, maker: BackendMaker, mailbox: Mailbox, *, follows: bool = True
    ) -> None:
        self.state = BackedState.IDLE
        self.formation = 0
        self.group = group
        self._rank, self._size = group.view.rank, group.view.size
        self._reactor = group.engine.reactor
        self.device = device
        self._maker = maker
        self._channel = Channel(mailbox, group.view, self._reactor, self._heard, self._go_on)
        self._stream: Any = None
        self._launcher: DeviceLauncher | None = None
        self.backend: CollectiveBackend | None = None
        self._before: deque[DeviceCall] = deque()  # came while there was no formation
        self._launched: dict[DeviceCall, None] = {}
        self._is_ordering = False
        self._failures = Failures(group, Ways(partial(self._say, FAILED), self._forbid, self._break, self._arrive_all))
        self._ended: set[int] = set()
        self._reason = ""
        self._timers = Timers(self._reactor)
        ways = OrderWays(self._is_ready, self._launch, partial(self._say, ORDER), self._fail)
        self._order = CallOrder(group.view, self._channel, self._timers, self._reactor, ways, follows=follows)
        self.launches: Launches = Launches(self, device, group.engine, group.timeout_s)
        # What is no call here, but of the host's memory, may be one elsewhere.
        group.engine.mismatch_listeners[group.view.id] = self.never_began

    @property
    @override
    def name(self) -> str:
        return self._maker.name

    @property
    def num_messages(self) -> int:
        """Sent so far by this rank, about the order and about formations."""
        return self._channel.num_sent

    # ---------------------------------------------------------------- calls

    @override
    def begin(self, call: DeviceCall) -> None:
        if self._failures.knows(_use_of(call)):
            call.failed(CollectiveAborted(f"{call.title} failed on another rank", key=name_of(call.key)))
        elif self._is_ordering and not self._failures.hold:
            self._order.arrive(call)
        else:
            self._before.append(call)
            self._form_if_wanted()

    @override
    def give_up(self, call: DeviceCall) -> None:
        # What is launched stays, with its memory, until its stream is past it.
        if call in self._before:
            self._before.remove(call)
        elif call not in self._order.waiting and call not in self._launched:
            return  # what failed before has ended it
        self._failures.failed(_use_of(call), launched=self._forbid(_use_of(call)))

    @override
    def never_began(self, key: str, seq: int) -> None:
        # Others may have begun it.
        if self.state is not BackedState.CLOSED:
            self._failures.failed((key, seq), launched=False)

    @override
    def hurry(self) -> None:
        self.launches.watch()

    @override
    def close(self) -> None:
        self.state = BackedState.CLOSED
        self.group.engine.mismatch_listeners.pop(self.group.view.id, None)
        self._channel.close()
        self.launches.enter()
        self.launches.close()
        self._timers.close()
        launcher, self._launcher, self.backend = self._launcher, None, None
        if launcher is not None:
            launcher.close()
            on_thread(launcher.backend.abort if self._launched else launcher.backend.close)

    def _is_ready(self) -> bool:
        return self.state is BackedState.READY

    def _go_on(self) -> None:
        self._order.launch_due()

    def _launch(self, call: DeviceCall) -> None:
        if self._launcher is not None:
            self._launched[call] = None
            self._launcher.launch(call, key_of(call), alone=self._size == 1)

    def _has_launched(self, call: DeviceCall, mark: Mark, error: BaseException | None) -> None:
        self.launches.put(call, self._stream)
        if error is not None:
            call.failed(error)
            return
        call.enqueued(mark)
        self.look_later()

    # ---------------------------------------------------------------- uses that are launched at once

    def takes(self, name: CompiledLaunch) -> bool:
        """Give the next use its place in the order if it may be launched now; else nothing has happened."""
        launcher, failures, key, engine = self._launcher, self._failures, name.series.key, name.engine
        # Any other call of the name, any failure and any loss needs the full path, which reports what is wrong. A call
        # that is launched is none: else a name whose uses follow each other quickly would never leave the full path.
        if key.live and not all(map(is_enqueued, key.live.values())):
            return False
        if key.early or engine.unusual or engine.router.dead or name.devices.has_news:
            return False
        if self.state is not BackedState.READY or launcher is None or launcher.num_under_way or self._before:
            return False
        if key.begun not in (None, name) or (failures.known and not failures.allow((key.name, key.next_seq))):
            return False
        order = self._order
        return not order.waiting and (self._size == 1 or order.known.take(name.order_key))

    def entered(self, call: DeviceCall) -> None:
        """Know a call that was launched as a use."""
        self._launched[call] = None

    def passed(self, call: DeviceCall, reason: str | None) -> None:
        """End a launched call: the device has passed it, or has failed for this reason."""
        self._launched.pop(call, None)
        if call.is_over:
            return
        if reason:
            call.failed(TransportError(f"{self.name}: {reason}"))
        else:
            call.done()

    def launch_failed(self, call: DeviceCall, error: BaseException) -> None:
        """Fail a call whose launch was refused, after it has taken its place."""
        self._launched[call] = None
        self._has_launched(call, None, error)

    def look_later(self) -> None:
        """Look soon whether the backend has failed, and whether uses are late."""
        if self._look not in self._timers and self._fail not in self._timers:
            self._timers.set(self._look, self._reactor.time() + min(LOOK_EVERY_S, self.launches.late_s))

    # ---------------------------------------------------------------- forming

    def _form_if_wanted(self) -> None:
        if self._rank != LEADER or self.state is not BackedState.IDLE or not self._before:
            return
        self.state = BackedState.FORMING
        self._order.renew()
        in_thread(self._reactor, self._maker.identity, self._identified)

    def _identified(self, identity: bytes | None, error: BaseException | None) -> None:
        if self.state is not BackedState.FORMING:
            return
        if identity is None:
            self.state = BackedState.IDLE
            before, self._before = self._before, deque()
            for call in before:
                call.failed(TransportError(f"{self.name}: {error}"))
        else:
            self._say(FORM, identity)
            self._connect(identity)

    def _connect(self, identity: bytes) -> None:
        self.state = BackedState.FORMING
        if self._stream is None:
            self._stream = self.device.stream(urgent=True)
        connect = partial(self._maker.connect, identity, self._rank, self._size, self.device)
        in_thread(self._reactor, connect, partial(self._connected, self.formation))
        self._is_ordering = True
        self._arrive_all()

    def _arrive_all(self) -> None:
        while self._is_ordering and not self._failures.hold and self._before:
            self._order.arrive(self._before.popleft())

    def _connected(self, formation: int, backend: CollectiveBackend | None, error: BaseException | None) -> None:
        if self.state is not BackedState.FORMING or formation != self.formation:
            if backend is not None:
                on_thread(backend.abort)
            if self.state is BackedState.ENDING and formation == self.formation:
                self._end()
        elif backend is None:
            self._fail(str(error))
        else:
            self.backend = backend
            self._launcher = DeviceLauncher(backend, self.device, self._stream, self._reactor, self._has_launched)
            self.state = BackedState.READY
            self._order.launch_due()

    # ---------------------------------------------------------------- breaking, and beginning anew

    def _fail(self, reason: str) -> None:
        """Fail the backend, and with it every call."""
        if self._is_ordering:
            self._break(reason)
            self._failures.failed(("", -1 - self.formation), launched=True)

    def _forbid(self, use: Use) -> bool:
        """Forbid the launch of a failed use; return whether it has been launched."""
        self.launches.enter()
        call = next((one for one in self._order.waiting if _use_of(one) == use), None)
        if call is not None and self._order.withdraw(call):
            return False
        return call is not None or any(_use_of(one) == use for one in self._launched)

    def _break(self, reason: str) -> None:
        """End this formation, if there is one."""
        if not self._is_ordering:
            return
        self.state, was = BackedState.ENDING, self.state
        self._is_ordering = False
        for what in (self._look, self._fail):
            self._timers.set(what, None)
        self._reason = f"{reason}, which ended what was in flight on {self.name}"
        logger.warning("%s: %s", self.group.view.called(self._rank), self._reason)
        self.launches.enter()
        self._abort(self._order.stop())
        self._timers.set(self._end, self._reactor.time() + (MEET_S if was is BackedState.FORMING else GRACE_S))

    def _end(self) -> None:
        """End the backend, and with it launches that are not complete."""
        if self.state is not BackedState.ENDING:
            return
        self._timers.set(self._end, None)
        self._abort(list(self._launched))
        launcher, self._launcher, self.backend = self._launcher, None, None
        if launcher is None:
            self._is_ended()
        else:
            launcher.close()
            in_thread(self._reactor, launcher.backend.abort, lambda *_: self._is_ended())

    def _abort(self, calls: list[DeviceCall]) -> None:
        for call in calls:
            call.failed(CollectiveAborted(self._reason, key=name_of(call.key)))

    def _is_ended(self) -> None:
        if self.state is not BackedState.ENDING:
            return
        if self._rank == LEADER:
            self._has_ended(LEADER)
        else:
            self.state = BackedState.IDLE
            self._say(ENDED, None, LEADER)

    def _has_ended(self, rank: int) -> None:
        """Let the leader continue when all ranks have ended: the next formation must not hear this one's messages."""
        self._ended.add(rank)
        if len(self._ended) == self._size:
            self._ended.clear()
            self.state = BackedState.IDLE
            self.formation += 1
            self._form_if_wanted()

    # ---------------------------------------------------------------- what is said, and the clock

    def _say(self, kind: int, body: Any, to: int | None = None) -> None:
        """Send to one rank, or all others."""
        said = [self.formation, kind, body]
        if to is None:
            self._channel.tell_all(said)
        else:
            self._channel.tell(to, said)

    def _heard(self, sender: int, said: Any) -> None:
        """Handle a message of another rank."""
        try:
            formation, kind, body = said
            self._hear(sender, formation, kind, body)
        except (TypeError, ValueError) as error:
            who = self.group.view.called(sender)
            self._fail(f"{who} sent a message about the order that cannot be: {error}")

    def _hear(self, sender: int, formation: int, kind: int, body: Any) -> None:
        if kind == FAILED:
            self._failures.hear(sender, body, is_current=formation == self.formation)
        elif kind == FORM and sender == LEADER and self.state is BackedState.IDLE:
            self.formation = formation
            self._order.renew()
            self._connect(body)
        elif kind == ENDED and self._rank == LEADER and formation == self.formation:
            self._has_ended(sender)
        elif kind == ORDER and formation == self.formation and self._is_ordering:
            self._order.hear(sender, body)

    def _look(self) -> None:
        """Whether the backend has failed, while something is launched."""
        self._timers.set(self._look, None)
        if self.state is not BackedState.READY or not (self._launched or self.launches):
            return
        reason = self.failure()
        if reason is None:
            self.launches.enter_late()
            self.look_later()
        else:
            self._timers.set(self._fail, self._reactor.time() + DOUBT_S, f"{self.name} failed: {reason}")

    # ---------------------------------------------------------------- shared

    def failure(self) -> str | None:
        """Reason why launched calls are not complete though the device has passed them."""
        return self._reason if self._launcher is None else self._launcher.backend.failure()


def _use_of(call: DeviceCall) -> Use:
    return call.key, call.head.seq
