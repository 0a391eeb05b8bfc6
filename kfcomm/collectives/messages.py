"""The verbs between two ranks (send and recv, queues, blobs), and ``consensus``."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.arrays.kinds import ArrayKind
from kfcomm.collectives.blobs import Blobs, checked_version
from kfcomm.collectives.exchange import ExchangeVerbs
from kfcomm.collectives.handle import Handle
from kfcomm.collectives.mailbox import Mailbox
from kfcomm.collectives.objects import fingerprint, packed, unpacked
from kfcomm.collectives.receives import MessageForm, Outcome, Received, both
from kfcomm.collectives.specs import ALL_GATHER, PLAIN, CallOptions
from kfcomm.collectives.steps import Steps
from kfcomm.common.arguments import checked_name, whole_number
from kfcomm.common.sizes import seconds_of
from kfcomm.errors import CollectiveTimeout, ConfigError
from kfcomm.strategies import StrategySpec
from kfcomm.types import Seconds

Tag = int | str


class Messages(ExchangeVerbs):
    """The verbs that are not of the whole group, and ``consensus``."""

    _mailbox: Mailbox
    _blobs: Blobs

    def send(
        self, x: Any, to: int | None = None, tag: Tag = 0, *, dest: int | None = None, synchronous: bool = False,
        timeout: Seconds | None = None, priority: int = 0, stream: Any = None,
    ) -> Handle[None]:  # fmt: skip
        """Send an array to rank ``to``; done when it may be modified again.

        That is at once where it has 64 KiB at most: then it is copied, whether or not the receiver has called ``recv``.
        Of what no ``recv`` has taken yet 1 MiB, or 256 messages, are kept for each receiver; beyond that, and for a
        larger array, it is when that rank has received it. A copy that fails later (the receiver expects another
        shape, is lost, or takes it not before the timeout) fails there, and is logged here.

        Args:
            x: array of any shape and supported dtype; not to be modified before the handle is done.
            to: rank in the group, not this one.
            tag: tells kinds of messages apart; those with one tag arrive in the order of the calls.
            dest: another name of ``to``.
            synchronous: it is done when that rank has received it, however small it is, and raises what goes wrong.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            stream: see ``all_reduce``.
        """
        to = _one_of("to", to, "dest", dest)
        options = CallOptions(timeout=timeout, priority=priority, stream=stream)
        return self._send(x, to, _key(tag), options, may_copy=not synchronous)

    def recv(
        self, source: int | None = None, tag: Tag = 0, *, src: int | None = None, out: Any = None, like: Any = None,
        timeout: Seconds | None = None, priority: int = 0, stream: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """The next message with this tag from rank ``source``, or from any rank.

        Messages of one sender come in the order of their ``send``, to receives in the order of their calls. A receive
        that is cancelled or times out takes no message with it: the next one gets that, wherever it was.

        Args:
            source: rank in the group, not this one; None: any, which waits for as long as another rank is left.
            tag: see ``send``.
            src: another name of ``source``.
            out: where the message goes.
            like: an array of the kind that the result should have: a tensor, say. Only its kind matters.
            timeout: seconds until the message is here as a whole; None for the communicator's.
            priority: of the reply that tells the sender that the message is here; see ``all_reduce``.
            stream: the caller's, where ``out`` is on a device.

        Returns:
            A handle; its result is a NumPy array of the sender's shape and dtype, one of the kind of ``like``, or
            ``out``, which must fit them (see ``all_reduce``; else ``CollectiveMismatch`` on both ranks; only here, if
            the message was left by a receive that had ended, and its sender is done).

        Raises:
            ConfigError: an argument cannot work; nothing is begun.
            CollectiveTimeout: the message was not here in time; nothing is lost.
            CollectiveAborted: the sender has cancelled it, or could not send it.
            PeerLost: the sender is gone, or all others for any rank.

        Cost: one message. Messages left by receives that have ended are kept, one for each.
        """
        source = _one_of("source", source, "src", src)
        options = CallOptions(out=out, timeout=timeout, priority=priority, stream=stream)
        return self._recv(source, _key(tag), options, like, _array)

    def recv_any(
        self, source: int | None = None, tag: Tag = 0, *, src: int | None = None, out: Any = None, like: Any = None,
        timeout: Seconds | None = None, priority: int = 0, stream: Any = None,
    ) -> Handle[tuple[Any, int]]:  # fmt: skip
        """As ``recv``; the result is ``(array, rank of the sender)``."""
        source = _one_of("source", source, "src", src)
        options = CallOptions(out=out, timeout=timeout, priority=priority, stream=stream)
        return self._recv(source, _key(tag), options, like)

    def send_object(
        self, value: Any, to: int | None = None, tag: Tag = 0, *, dest: int | None = None, synchronous: bool = False,
        timeout: Seconds | None = None, priority: int = 0,
    ) -> Handle[None]:  # fmt: skip
        """Send anything that msgpack can carry to rank ``to`` (or ``dest``), for its ``recv_object``; see ``send``."""
        self._check_open()
        to, key = self._check_other("to", _one_of("to", to, "dest", dest)), _key(tag, "object ")
        try:
            data = packed(value)
        except Exception as error:
            self._refuse_message(to, key, error)
            raise
        options = CallOptions(timeout=timeout, priority=priority)
        return self._send(data, to, key, options, may_copy=not synchronous)

    def recv_object(
        self, source: int | None = None, tag: Tag = 0, *, src: int | None = None, timeout: Seconds | None = None,
        priority: int = 0,
    ) -> Handle[Any]:  # fmt: skip
        """The next object with this tag from rank ``source`` (or ``src``), or from any rank."""
        source = _one_of("source", source, "src", src)
        options = CallOptions(timeout=timeout, priority=priority)
        return self._recv(source, _key(tag, "object "), options, outcome=_object)

    def queue(self, name: str, source: int, target: int, *, capacity: int = 16) -> Queue:
        """An ordered queue of arrays from rank ``source`` to rank ``target``; both make their end of it.

        Args:
            name: the queue's name in this group.
            source: the rank that puts.
            target: the rank that gets.
            capacity: arrays that may be under way before ``put`` waits.
        """
        self._check_open()
        name = checked_name(name)
        source, target = self._check_rank("source", source), self._check_rank("target", target)
        if source == target:
            raise ConfigError(f"expected two different ranks for a queue, got {source} as source and target")
        limit = whole_number(capacity)
        if limit is None or limit < 1:
            raise ConfigError(f"expected a capacity of at least 1 array, got {capacity!r}")
        return Queue(self, name, source, target, limit)

    def save(self, name: str, x: Any, *, version: int | None = None) -> int:
        """Keep a copy of ``x`` for others to ``request``; returns its version. The last two of a name are kept.

        ``x``: an array, or ``bytes``, which others get as an array of uint8.

        Cost: a copy, where ranks of this host share memory in that memory; three at most are there at a time.
        """
        self._check_open()
        return self._blobs.save(checked_name(name), x, version)

    async def request(
        self, name: str, source: int, *, version: int | None = None, like: Any = None, timeout: Seconds | None = None
    ) -> Any:
        """A copy of what rank ``source`` saved as ``name``: its latest version, or the one asked for.

        Args:
            name: given to ``save``.
            source: rank in the group; may be this one.
            version: None for the latest.
            like: see ``recv``.
            timeout: see ``all_reduce``.

        Raises:
            CollectiveError: that rank has saved no such version.

        Cost: of ranks that share memory a copy, some 10 µs for a few KB, which needs nothing of that rank, busy or
        stopped; the first request for a name, and what is not there, and between hosts: two messages.
        """
        name, source, version, kind = self._requested(name, source, version, like)
        return await self._blobs.request(name, source, version, seconds_of(timeout), kind)

    def _request_now(self, name: str, source: int, version: int | None, like: Any, timeout: Seconds | None) -> Any:
        """The result of a request that needs no message; None if it does. On any thread; errors as of ``request``."""
        name, source, version, kind = self._requested(name, source, version, like)
        seconds_of(timeout)
        return self._blobs.request_now(name, source, version, kind)

    def _requested(
        self, name: str, source: int, version: int | None, like: Any
    ) -> tuple[str, int, int | None, ArrayKind]:
        self._check_open()
        name, version = checked_name(name), checked_version(version)
        kind = self._devices.arrays.kind_like(like)
        return name, self._check_rank("source", source), version, kind

    def consensus(
        self, x: Any, name: str | None = None, *, timeout: Seconds | None = None, priority: int = 0,
        strategy: StrategySpec | None = None,
    ) -> Steps:  # fmt: skip
        """Whether all ranks hold the same; a handle of a bool. Cost: 32 bytes per rank.

        Args:
            x: an array or a number: the same bytes, shape and dtype are the same. Or a string, bytes, None, or a dict,
                list or set of any of all these, arrays among them: dicts and sets are the same in whatever order.
            name: see ``all_reduce``, also for the rest.
            timeout: see ``all_reduce``.
            priority: see ``all_reduce``.
            strategy: see ``all_reduce``.
        """
        options = CallOptions(timeout=timeout, priority=priority, strategy=strategy, is_step=True)
        with self._checks(name, options) as (name, options):
            mine = np.frombuffer(fingerprint(x), np.uint8)
        everyone = self._on_host(ALL_GATHER, mine, name, options)
        return self._mapped(everyone, lambda table: bool((table == table[0]).all()))

    def _send(
        self, x: Any, to: int | None, key: str, options: CallOptions = PLAIN, *, may_copy: bool = False
    ) -> Handle[None]:
        self._check_open()
        options = options.checked()
        to = self._check_other("to", to)
        try:
            array, fetched = self._devices.arrays.on_host(x, options.stream)
        except Exception as error:
            self._refuse_message(to, key, error)
            raise
        after = f"\0to {to} {key}"
        if fetched is None and not self._group.turns.has(after):
            return self._mailbox.send(array, to, key, options, may_copy=may_copy)

        # It has to come from a device first, or follows such a message under its tag.
        turn = self._group.turns.next(after)
        whole = Steps(loop=self._group.engine.loop)
        reactor = self._group.engine.reactor

        def begin() -> None:
            error = asyncio.CancelledError() if whole.cancelled() else fetched and fetched.here.exception()
            if error:
                self._refuse_message(to, key, error)
                whole.fail(error)
            else:
                sent = self._mailbox.send(array, to, key, options, may_copy=may_copy)
                whole.end_as(sent, reactor)

        if fetched is None:
            turn.ready(begin)
        else:
            fetched.here.when_done(reactor, lambda _: turn.ready(begin))
            whole.when_done(reactor, fetched.release)
        return whole

    def _refuse_message(self, to: int, key: str, error: BaseException) -> None:
        view = self._group.view
        why = str(error) or type(error).__name__
        self._mailbox.refuse(view.rank, to, key, f"{view.called(view.rank)} could not send a message with {key}: {why}")

    def _recv(
        self, source: int | None, key: str, options: CallOptions, like: Any = None, outcome: Outcome = both
    ) -> Received[Any]:
        self._check_open()
        options = options.checked()
        out, stream = options.out, options.stream
        if source is not None:
            source = self._check_other("source", source)
        target = None
        if out is not None and like is not None:
            raise ConfigError("expected out or like, got both: out determines the kind of the result")
        kind = self._devices.arrays.kind_like(like, stream)
        if out is not None:
            like = self._devices.arrays.read(out, stream)
            target = self._devices.arrays.out_of_host(out, like.shape, like.dtype, stream)
        return self._mailbox.recv(source, key, options, MessageForm(target, kind, outcome))

    def _check_other(self, what: str, rank: Any) -> int:
        number = self._check_rank(what, rank)
        if number == self._group.view.rank:
            raise ConfigError(f"{what} {number} is this rank itself: give another rank")
        return number


class Queue:
    """One end of an ordered, bounded queue of arrays between two ranks; see ``Communicator.queue``."""

    def __init__(self, messages: Messages, name: str, source: int, target: int, capacity: int) -> None:
        self._messages = messages
        self._key = f"queue {name!r}"
        self._source = source
        self._target = target
        self._room = asyncio.Semaphore(capacity)
        self._failure: BaseException | None = None

    async def put(self, x: Any, *, timeout: Seconds | None = None) -> None:
        """Append a copy of ``x``; waits while ``capacity`` arrays have not been taken.

        Args:
            x: array of any shape and supported dtype.
            timeout: seconds, for the wait and then for the array to be taken; None for the communicator's.

        Raises:
            ConfigError: this rank is not the source, or ``x`` cannot be sent; the queue stays usable.
            CollectiveTimeout: the queue was still full at the timeout; it stays usable.
            CollectiveError: an earlier array could not be delivered; the queue is broken.
        """
        view = self._messages._group.view
        if view.rank != self._source:
            whose = f"the source of {self._key} is {view.called(self._source)}"
            raise ConfigError(f"{view.called(view.rank)} cannot put: {whose}")
        timeout_s = seconds_of(timeout)
        array = adapt(x)
        copy = array.flat.copy().reshape(array.shape)
        await self._wait_for_room(timeout_s)
        try:
            sent = self._messages._send(copy, self._target, self._key, CallOptions(timeout=timeout))
        except BaseException:
            self._room.release()
            raise
        sent.when_done(self._messages._group.engine.reactor, self._taken)

    async def _wait_for_room(self, timeout_s: float | None) -> None:
        limit_s = self._messages._group.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._room.acquire()
        except TimeoutError:
            target = self._messages._group.view.called(self._target)
            message = f"{self._key} is still full after {limit_s:.1f} s: {target} has not taken an array from it"
            ranks = {"arrived": (self._source,), "missing": (self._target,)}
            raise CollectiveTimeout(message, key=self._key, **ranks) from None
        if self._failure is not None:
            self._room.release()
            raise self._failure

    async def get(self, *, out: Any = None, like: Any = None, timeout: Seconds | None = None) -> Any:
        """The next array, as NumPy's, of the kind of ``like``, or in ``out``; see ``recv``, also for the errors.

        One that is cancelled or times out takes no array with it: the next one gets it.

        Raises:
            ConfigError: this rank is not the target.
        """
        view = self._messages._group.view
        if view.rank != self._target:
            whose = f"the target of {self._key} is {view.called(self._target)}"
            raise ConfigError(f"{view.called(view.rank)} cannot get: {whose}")
        options = CallOptions(out=out, timeout=timeout)
        return await self._messages._recv(self._source, self._key, options, like, _array)

    def _taken(self, sent: asyncio.Future[None]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if self._failure is None:
            self._failure = error
        self._room.release()


def _array(array: Any, _: int) -> Any:
    return array


def _object(array: Any, _: int) -> Any:
    return unpacked(array)


def _one_of(name: str, rank: int | None, other_name: str, other: int | None) -> int | None:
    """Return the rank that was given by either of two names.

    Raises:
        ConfigError: by both.
    """
    if other is None:
        return rank
    if rank is not None:
        raise ConfigError(f"{name} and {other_name} are the same option: give one of them")
    return other


def _key(tag: Tag, kind: str = "") -> str:
    """The key of messages with this tag, for people too; kinds of messages do not meet."""
    number = whole_number(tag)
    if number is not None:
        return f"{kind}tag {number}"
    if not isinstance(tag, str):
        raise ConfigError(f"expected a whole number or a string as tag, got {tag!r}")
    return f"{kind}tag {checked_name(tag)!r}"
