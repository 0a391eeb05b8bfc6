"""Parts of one formation of a backend: the launcher, the channel between ranks, and the decision about failed calls.

A backend may connect two ranks only at the first launch that needs it, which then waits until both have come. The event
loop must not wait, since other ranks may need messages from it. So `DeviceLauncher` makes the first launch of a kind on
a thread, together with the launches that come meanwhile. It makes all later ones directly.

Messages of a `Channel` are small and ordered; none is lost or doubled. They travel as messages of the group's
mailbox, under a tag of their own; those to one rank in one turn of the loop travel as one. A message that a broken
link may have lost is sent again, under its number: a rank that has had it ignores it.

A call that only some ranks launch blocks every later launch: it *ends* the formation. A failed call that no rank
launches, now or later, ends nothing. So when a call fails, one rank decides for all (`Failures`)::

    a rank that fails at it     REPORT to the leader: whether it has launched it
    the leader, unless it has   ASK to all: a rank that hears it launches the call no more, and ANSWERs whether it
    been launched               has; one that does not answer in time may have
    the leader                  OUTCOME to all: whether the formation is over

After a failed call a rank begins no other call before the outcome: it might begin that in a formation that other ranks
are about to end. Nor does it begin a call that it knows to have failed.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack
import numpy as np

from kfcomm.arrays import adapt
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.on_device import tell
from kfcomm.collectives.receives import Message
from kfcomm.core.collective import GroupView, shown
from kfcomm.core.launch_order import LEADER
from kfcomm.errors import CollectiveAborted, CollectiveError, KfcommError, PeerLost, TransportError
from kfcomm.transports.reactor import Reactor

if TYPE_CHECKING:
    from kfcomm.arrays.devices import Device, Mark, Stream
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.on_device.calls import DeviceCall
    from kfcomm.transports.base import CollectiveBackend


Launched: TypeAlias = "Callable[[DeviceCall, Mark, BaseException | None], None]"


class DeviceLauncher:
    """Puts calls on a stream; everything but the thread runs on the loop.

    Args:
        backend: of one formation.
        device: of this rank.
        stream: for all launches.
        reactor: gets the results of the thread.
        launched: called on the loop with each call, and the mark behind which its result is complete, or an error.

    Attributes:
        backend: as given.
        num_under_way: launches on the thread, or waiting for it.
    """

    def __init__(
        self, backend: CollectiveBackend, device: Device, stream: Stream, reactor: Reactor, launched: Launched
    ) -> None:
        self.backend = backend
        self._device = device
        self._stream = stream
        self._reactor = reactor
        self._launched = launched
        self._kinds: set[str] = set()
        self.num_under_way = 0
        self._queue: queue.SimpleQueue[DeviceCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def launch(self, call: DeviceCall, kind: str, *, alone: bool) -> None:
        """Make the next launch; after the first of a ``kind``, others of that kind do not block."""
        if not self.num_under_way and (alone or kind in self._kinds):
            self._launched(call, *self._put(call))
            return
        self._kinds.add(kind)
        self.num_under_way += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kfcomm-launches", daemon=True)
            self._thread.start()
        self._queue.put(call)

    def close(self) -> None:
        """Stop launching; a launch under way ends by itself, or by the backend's abort."""
        self._queue.put(None)

    def _put(self, call: DeviceCall) -> tuple[Mark, BaseException | None]:
        try:
            self._device.wait(self._stream, call.ready)
            kind = call.kind
            self.backend.launch(kind.verb, call.parts, kind.op, kind.root, self._stream)
            return self._device.mark(self._stream), None
        except Exception as error:  # noqa: BLE001  of the device's libraries: it belongs to the call
            return None, error if isinstance(error, TransportError) else TransportError(str(error))

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            mark, error = self._put(call)
            tell(self._reactor, self._back, call, mark, error)
            del call, mark, error  # this thread keeps no memory alive while it waits for the next one

    def _back(self, call: DeviceCall, mark: Mark, error: BaseException | None) -> None:
        self.num_under_way -= 1
        self._launched(call, mark, error)


logger = logging.getLogger("kfcomm")

TAG = "\0order"
LEAST_NBYTES = 64
"""Records are padded to powers of two from here on: each size is a signature, which both ends of a link remember."""
AGAIN_AFTER_S = 0.1

Listener = Callable[[int, Any], None]


class Channel:
    """This rank's end, to and from every other rank of the group.

    Args:
        mailbox: of the group.
        view: the group.
        reactor: the engine's.
        listener: called with each message and its sender, in the order of that sender.
        heard: called when all receivers of a message have it.

    Attributes:
        batch: number of the next message, and of all others in this turn of the loop.
        num_sent: messages so far.
    """

    def __init__(
        self, mailbox: Mailbox, view: GroupView, reactor: Reactor, listener: Listener, heard: Callable[[], None]
    ) -> None:
        self.batch = 0
        self.num_sent = 0
        self._heard = heard
        self._unheard: dict[int, int] = {}
        self._mailbox = mailbox
        self._view = view
        self._reactor = reactor
        self._listener = listener
        self._outbox: dict[int, list[Any]] = {}
        self._next_to: dict[int, int] = {}
        self._next_from: dict[int, int] = {}
        self._ahead: dict[int, dict[int, list[Any]]] = {}
        self._is_closed = False
        mailbox.serve(TAG, self._receive)

    def tell(self, rank: int, what: Any) -> None:
        """Send one rank something that msgpack can carry, soon."""
        if not self._outbox:
            self._reactor.call_soon(self._flush)
            self._unheard[self.batch] = 0
        self._outbox.setdefault(rank, []).append(what)

    def tell_all(self, what: Any) -> None:
        """Send it to every other rank."""
        for rank in range(self._view.size):
            if rank != self._view.rank:
                self.tell(rank, what)

    def is_heard(self, batch: int) -> bool:
        """Whether all ranks have received their messages up to this batch, or are gone."""
        return not any(number <= batch for number in self._unheard)

    def close(self) -> None:
        """Stop sending and hearing."""
        self._is_closed = True
        self._outbox.clear()
        self._unheard.clear()

    def _flush(self) -> None:
        if self._is_closed:
            return
        outbox, self._outbox = self._outbox, {}
        batch = self.batch
        self.batch += 1
        self._unheard[batch] = len(outbox)
        for rank, said in outbox.items():
            number = self._next_to.get(rank, 0)
            self._next_to[rank] = number + 1
            self.num_sent += 1
            self._send(rank, batch, _record([number, said]))

    def _send(self, rank: int, batch: int, record: Any) -> None:
        if self._is_closed:
            return
        handle = self._mailbox.send(adapt(record), rank, TAG)
        handle.when_done(self._reactor, lambda done: self._sent(rank, batch, record, done))

    def _sent(self, rank: int, batch: int, record: Any, done: Handle[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if self._is_closed:
            return
        if isinstance(error, CollectiveError) and not isinstance(error, (PeerLost, CollectiveAborted)):
            mine, other = self._view.called(self._view.rank), self._view.called(rank)
            logger.warning("what %s tells %s is sent again: %s", mine, other, error)
            self._reactor.call_later(AGAIN_AFTER_S, self._send, rank, batch, record)
            return
        self._unheard[batch] -= 1
        if not self._unheard[batch]:
            del self._unheard[batch]
            self._heard()

    async def _receive(self, source: int, message: Handle[Message]) -> None:
        record, _ = await message
        number, said = _content(record)
        expected = self._next_from.get(source, 0)
        ahead = self._ahead.setdefault(source, {})
        if number >= expected:
            ahead[number] = said
        while not self._is_closed and (ready := ahead.pop(self._next_from.get(source, 0), None)) is not None:
            self._next_from[source] = self._next_from.get(source, 0) + 1
            for one in ready:
                self._listener(source, one)


def _record(content: Any) -> Any:
    packed = msgpack.packb(content)
    nbytes = LEAST_NBYTES
    while nbytes < len(packed):
        nbytes *= 2
    record = np.zeros(nbytes, np.uint8)
    record[: len(packed)] = np.frombuffer(packed, np.uint8)
    return record


def _content(record: Any) -> tuple[int, list[Any]]:
    unpacker = msgpack.Unpacker(max_buffer_size=record.size, strict_map_key=False)
    unpacker.feed(record.tobytes())
    try:
        number, said = unpacker.unpack()
        if type(number) is not int or number < 0 or type(said) is not list:
            raise ValueError((number, said))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise KfcommError(f"invalid message about the launch order: {error}") from error
    return number, said


Use: TypeAlias = tuple[str, int]
"""A key, and the number of its use. What fails without a call has an empty key, and a number below 0."""

REPORT, ASK, ANSWER, OUTCOME = range(4)

MAX_KNOWN = 4096
"""Failures that are remembered; of more, the first is forgotten."""
ANSWER_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Ways:
    """Functions that send messages about failures and carry out what follows."""

    tell: Callable[..., None]  # one rank; without a rank all others, which only the leader does
    forbid: Callable[[Use], bool]  # a use whose launch is forbidden from now on; returns whether it was launched
    end: Callable[[str], None]  # ends the formation, for this reason
    go_on: Callable[[], None]  # lets held-back calls continue


class Failures:
    """This rank's part of the decision; everything runs on the engine's loop.

    Attributes:
        known: uses that have failed, as far as they are remembered.
    """

    def __init__(self, group: Group, ways: Ways) -> None:
        self._group = group
        self._ways = ways
        self._leads = group.view.rank == LEADER
        self.known: OrderedDict[Use, None] = OrderedDict()
        self._undecided: set[Use] = set()  # here, until the outcome
        self._asked: dict[Use, set[int]] = {}  # by the leader: who has yet to answer

    @property
    def hold(self) -> bool:
        """Whether this rank is to begin nothing for now."""
        return bool(self._undecided)

    def allow(self, use: Use) -> bool:
        """Whether this use may begin now."""
        return not self._undecided and use not in self.known

    def knows(self, use: Use) -> bool:
        """Whether this use has failed."""
        return use in self.known

    def failed(self, use: Use, *, launched: bool) -> None:
        """Handle a failed call of this rank, or a failed backend, which counts as launched."""
        if use in self.known and use not in self._asked:
            return
        self._know(use)
        self._undecided.add(use)
        if self._leads:
            self._look(use, launched=launched)
        else:
            self._ways.tell([REPORT, *use, launched], LEADER)
            if launched:
                self._ways.end(_reason(use))

    def hear(self, sender: int, said: list[Any], *, is_current: bool) -> None:
        """Handle a message of another rank about a failure; ``is_current``: it is about the formation in force here.

        Raises:
            ValueError, TypeError: the message is malformed.
        """
        kind, key, seq, *rest = said
        use = (str(key), int(seq))
        if self._leads and kind == REPORT:
            if use not in self.known or use in self._asked:
                self._know(use)
                self._look(use, launched=bool(rest[0]) and is_current)
        elif self._leads and kind == ANSWER:
            self._answered(use, sender, launched=bool(rest[0]) and is_current)
        elif kind == ASK:
            self._know(use)
            self._ways.tell([ANSWER, *use, self._ways.forbid(use)], LEADER)
        elif kind == OUTCOME:
            self._know(use)
            self._undecided.discard(use)
            if rest[0] and is_current:
                self._ways.end(_reason(use))
            self._ways.go_on()

    def _know(self, use: Use) -> None:
        self.known[use] = None
        if len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)

    # ---------------------------------------------------------------- the leader

    def _look(self, use: Use, *, launched: bool) -> None:
        view = self._group.view
        if launched or self._ways.forbid(use):
            self._decide(use, ends=True)
        elif view.size == 1:
            self._decide(use, ends=False)
        elif use not in self._asked:
            self._asked[use] = set(range(view.size)) - {LEADER}
            self._ways.tell([ASK, *use])
            self._group.engine.reactor.call_later(ANSWER_WITHIN_S, self._unanswered, use)

    def _answered(self, use: Use, rank: int, *, launched: bool) -> None:
        left = self._asked.get(use)
        if left is None:
            return
        left.discard(rank)
        if launched or not left:
            self._decide(use, ends=launched)

    def _unanswered(self, use: Use) -> None:
        if use in self._asked:
            self._decide(use, ends=True)

    def _decide(self, use: Use, *, ends: bool) -> None:
        self._asked.pop(use, None)
        self._undecided.discard(use)
        self._ways.tell([OUTCOME, *use, ends])
        if ends:
            self._ways.end(_reason(use))
        self._ways.go_on()


def _reason(use: Use) -> str:
    return f"{shown(use[0])} failed" if use[0] else "the order or the backend failed"
