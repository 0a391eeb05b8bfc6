"""A link over a connected stream socket, TCP or Unix: the same frames on both.

It works on the raw non-blocking socket with readiness callbacks, not on an event loop's transports: those may keep a
view of a buffer after a write (uvloop does), and then an aborted send could reach the peer torn. Here it is known at
every moment which bytes the kernel has taken, so that exactly the rest can be dropped or copied.

Invariants:

- A large payload that is not whole in the staging buffer is received straight into its placement. A small one waits
  there for its rest: so many small frames come by one read, each without a placement.
- Owners and ``Inbound`` are never called from inside ``send``, ``withdraw``, ``disown``, ``close`` or
  ``abort``; ``flush`` calls ``Owner.sent`` only. The end of a link is always reported from the reactor.
- ``Inbound.lost`` is called exactly once, however a link ends, after every owner still queued was told.

Keys, credit and collectives are not known here; ``sockets`` opens connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Any

from kfcomm.core.frame import Header, Kind, decode_head, make_encoder
from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.base import Counts, Endpoint, Inbound, Link, Owner, Surroundings
from kfcomm.transports.outbox import MAX_HEAD_NBYTES, Frame, Outbox, StreamOptions
from kfcomm.transports.reactor import Readiness
from kfcomm.transports.sealed import Seals
from kfcomm.transports.sockets import Connection, StreamSocket, broken, hold_little
from kfcomm.transports.tcp_path import TcpPath, tcp_path
from kfcomm.types import override

_CHUNK, _BYE = int(Kind.CHUNK), int(Kind.BYE)


def why_unsupported() -> str | None:
    """Return why this process cannot use stream sockets: never."""
    return None


def open_endpoint(surroundings: Surroundings) -> StreamEndpoint:
    """Open the stream links of one rank, TCP and Unix alike."""
    return StreamEndpoint(surroundings, StreamLink)


class StreamEndpoint(Endpoint):
    """Stream links of one process: one for each connection; ``link`` is their class."""

    def __init__(self, surroundings: Surroundings, link: type[StreamLink]) -> None:
        self._surroundings = surroundings
        self._make = link

    @override
    async def connect(self, connection: Connection, peer: int) -> StreamLink:
        return self._link(connection, peer)

    @override
    def adopt(self, connection: Connection, peer: int) -> None:
        self._surroundings.inbound.opened(self._link(connection, peer))

    def _link(self, connection: Connection, peer: int) -> StreamLink:
        # The kernel moves the bytes of a Unix socket: nothing can change them on their way.
        is_sealed = self._surroundings.checksum and not connection.is_local
        seals = Seals(connection.keys, has_payloads=True) if is_sealed else None
        return self._make(connection.sock, self._surroundings.reactor, self._surroundings.inbound, peer, seals=seals)


class StreamLink(Link):
    """One connection; it owns ``sock`` and begins to read at once.

    Payloads are sent from where they are. Small payloads arrive in the staging buffer, which is reused at once: so none
    is lent.

    All calls belong to the driver of ``reactor``. A frame that the peer must not send ends this link alone; so does
    ``RemoteProtocolError`` raised by ``inbound``.

    ``reactor`` is a `Reactor`, or any asyncio loop with ``add_reader`` (uvloop, selector loops). ``seals`` are those of
    the frames in both directions. ``bytes_out`` and ``frames_out`` are what the kernel has taken; bytes include heads.
    """

    needs_flush = True

    def __init__(
        self, sock: StreamSocket, reactor: Readiness, inbound: Inbound, peer: int, *,
        options: StreamOptions | None = None, seals: Seals | None = None,
    ) -> None:  # fmt: skip
        sock.setblocking(False)
        self.peer = peer
        self.kind = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self.state: Any = None
        self.bytes_in = self.bytes_out = self.frames_in = self.frames_out = 0
        self._options = options = options or StreamOptions()
        self._burst_nbytes = options.burst_nbytes
        self._small_nbytes = options.small_nbytes
        self._sock = sock
        self._fd = sock.fileno()
        # Bound once: each is called for every small frame.
        self._send_bytes, self._receive_bytes = sock.send, sock.recv_into
        self._pending = getattr(sock, "pending", None)  # of one inside TLS
        self._reactor = reactor
        self._inbound = inbound
        self._ended = asyncio.Event()
        self._closing = self._shut = self._bye_received = False
        self._failure: OSError | None = None

        self._encode = make_encoder()
        self._outbox = Outbox(options) if seals is None else seals.outbox(options)
        self._reader = None if seals is None else seals.reader
        self._decode_head = decode_head if self._reader is None else self._reader.decode_head
        self._done: deque[Owner] = deque()
        self._flushing = self._writer_on = False

        # Of its bytes those from _start to _end have arrived and are not handed over; both are 0 if there are none.
        self._staging = memoryview(bytearray(options.staging_nbytes))
        self._room, self._room_nbytes = self._staging[: options.read_nbytes], options.read_nbytes
        # A smaller payload waits in the staging buffer for its rest. The head of a sealed frame is decoded only once.
        self._placed_from_nbytes = 0 if seals else min(options.read_nbytes, options.staging_nbytes - MAX_HEAD_NBYTES)
        self._ahead = self._staging[: options.lookahead_nbytes]
        self._start = self._end = 0
        self._placement: Any = None
        self._rest: memoryview | None = None
        self._skip = 0
        reactor.add_reader(self._fd, self._readable)

    def __repr__(self) -> str:
        now = "closed" if self._fd < 0 else "closing" if self._closing else "open"
        return f"<StreamLink to rank {self.peer}, {now}, {self.queued_nbytes} bytes queued>"

    @property
    def queued_nbytes(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._outbox.nbytes

    @override
    def counts(self) -> Counts:
        return Counts(self.bytes_out, self.bytes_in, self.frames_out, self.frames_in)

    @override
    def tcp_path(self) -> TcpPath | None:
        return tcp_path(self._sock) if self.kind == "tcp" else None

    # Sending.

    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        """Queue a frame; ``payload`` is a contiguous view of bytes. On a closed link the frame is dropped.

        Raises:
            LocalProtocolError: the frame is larger than frames may be.
        """
        head = self._encode(header, 0 if payload is None else len(payload))
        if not self._closing and self._fd >= 0:
            self._outbox.put(header, head, payload, owner, priority)
        elif owner is not None:
            self._done.append(owner)
            self._reactor.call_soon(self._tell_owners)
        return False

    @override
    def set_low_latency(self) -> None:
        self._burst_nbytes = min(self._options.burst_nbytes, self._options.low_latency_nbytes)
        self._outbox.gather_nbytes = min(self._options.gather_nbytes, self._options.low_latency_nbytes)
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a dead connection: reading tells so
                hold_little(self._sock)

    @override
    def flush(self) -> None:
        if self._writer_on or self._flushing or self._fd < 0:
            return
        frame = self._outbox.take_only()
        if frame is None:
            self._drain()
        else:
            self._send_only(frame)

    @override
    def withdraw(self, owner: Owner) -> list[Header]:
        # A frame that was half sent is not among those that were dropped.
        if self._done:
            self._done = deque(other for other in self._done if other is not owner)
        return self._outbox.withdraw(owner)

    def _send_only(self, frame: Frame) -> None:
        """Send the only frame there is: what ``_drain`` would do, in a third of the steps."""
        head, payload, nbytes, owner, _, _ = frame
        moved = 0
        try:
            if payload is None:
                moved = self._send_bytes(head)
            elif nbytes <= self._small_nbytes:
                moved = self._send_bytes(head + payload)
            else:
                moved = self._sock.sendmsg((head, payload))
        except OSError as error:
            if not isinstance(error, (BlockingIOError, InterruptedError)):
                self._outbox.put_back(frame)
                self._cannot_send(error)
                return
        self.bytes_out += moved
        if moved == nbytes:
            self._outbox.nbytes -= moved
            self.frames_out += 1
            if owner is not None:
                owner.sent()
        else:
            self._outbox.advance((frame,), moved, self._done)
            self._after_drain()

    def _drain(self) -> None:
        self._flushing = True
        budget = self._burst_nbytes
        try:
            while budget > 0 and self._outbox.nbytes:
                moved = self._send_some()
                if self._done:
                    self._tell_owners()
                if moved < 0:
                    break
                budget -= moved
        finally:
            self._flushing = False
            if self._outbox.nbytes or self._writer_on or self._closing:
                self._after_drain()

    def _after_drain(self) -> None:
        if self._fd < 0:
            return
        if self._outbox.nbytes:
            if not self._writer_on:
                self._writer_on = True
                self._reactor.add_writer(self._fd, self._drain)
            return
        if self._writer_on:
            self._writer_on = False
            self._reactor.remove_writer(self._fd)
        if self._closing and not self._shut:
            self._shut = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._end_with(self._broken(error))

    def _send_some(self) -> int:
        """One system call's worth of frames: bytes moved, or -1 when the kernel takes no more for now."""
        outbox = self._outbox
        batch, buffers, nbytes = outbox.gather()
        if not batch:  # Ctrl-C came while a frame was queued: its bytes are counted, and it is missing
            outbox.clear(self._done)
            return -1
        failure: OSError | None = None
        moved = 0
        try:
            moved = self._sock.send(buffers[0]) if len(buffers) == 1 else self._sock.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            failure = error
        self.bytes_out += moved
        self.frames_out += outbox.advance(batch, moved, self._done)
        if failure is not None:
            self._cannot_send(failure)
        return moved if moved == nbytes else -1

    def _cannot_send(self, error: OSError) -> None:
        """End the broken link, after what the peer has sent until then is read."""
        self._closing = self._shut = True
        self._failure = error
        self._outbox.clear(self._done)
        self._reactor.call_soon(self._read_out)

    def _read_out(self) -> None:
        self._tell_owners()
        before = -1
        while self._fd >= 0 and self.bytes_in > before:
            before = self.bytes_in
            self._readable()
        if self._fd >= 0 and self._failure is not None:
            self._end_with(self._broken(self._failure))

    def _tell_owners(self) -> None:
        while self._done:
            self._done.popleft().sent()

    # Receiving.

    @override
    def disown(self, owner: object) -> None:
        if self._rest is not None and self._placement.owner is owner:
            self._skip = len(self._rest)
            self._rest = self._placement = None

    @override
    def redirect(self, owner: object) -> None:
        if self._rest is not None and self._placement.owner is owner:
            self._placement.redirect()
            self._rest = self._placement.view[-len(self._rest) :]

    def _readable(self) -> None:
        budget = self._burst_nbytes
        try:
            while self._fd >= 0:
                if budget <= 0:
                    # Let others have their turn. The loop calls again for data in the kernel, not inside TLS.
                    if self._pending is not None and self._pending():
                        self._reactor.call_soon(self._readable_still)
                    break
                if self._rest is None and not self._end:
                    moved = self._end = self._receive_bytes(self._room)
                    wanted = self._room_nbytes
                else:
                    moved, wanted = self._receive_more()
                if not moved:
                    self._end_of_file()
                    break
                self.bytes_in += moved
                self._parse()
                if moved < wanted:  # the kernel has no more: asking again would cost 1.8 µs to hear so
                    break
                budget -= moved
        except (BlockingIOError, InterruptedError):
            pass
        except RemoteProtocolError as error:
            self._end_with(error)
        except OSError as error:
            self._end_with(self._broken(error))
        except BaseException as error:
            self._end_with(error)
            raise
        finally:
            self._inbound.burst_end(self)

    def _readable_still(self) -> None:
        if self._fd >= 0:
            self._readable()

    def _receive_more(self) -> tuple[int, int]:
        """Continue a payload or a head by one system call; returns bytes received and bytes asked for."""
        rest = self._rest
        if rest is not None:
            # The staging buffer is empty. A little of what follows comes along, which saves the call for its head.
            wanted = len(rest) + self._options.lookahead_nbytes
            moved = self._sock.recvmsg_into((rest, self._ahead))[0]
            if moved < len(rest):
                self._rest = rest[moved:]
            else:
                self._end = moved - len(rest)
                placement = self._placement
                self._rest = self._placement = None
                self.frames_in += 1
                if self._reader is not None:
                    self._reader.check(placement.view)
                self._inbound.arrived(self, placement)
            return moved, wanted
        left = self._end - self._start
        self._staging[:left] = self._staging[self._start : self._end]
        self._start, self._end = 0, left
        room = self._staging[left : left + self._options.read_nbytes]
        moved = self._receive_bytes(room)
        self._end += moved
        return moved, len(room)

    def _parse(self) -> None:
        """Hand over every frame that is whole in the staging buffer, and place the payload that is not."""
        staging, inbound, end = self._staging, self._inbound, self._end
        if self._skip:
            self._skip_some()
        start = self._start
        while start < end and self._fd >= 0:
            head = self._decode_head(staging, start, end)
            if head is None:
                self._start = start
                return
            header, payload_nbytes, body = head
            kind = header[0]
            if self._bye_received or (kind != _CHUNK and payload_nbytes):
                raise self._unexpected(kind, payload_nbytes)
            after = body + payload_nbytes
            if after > end:
                if payload_nbytes < self._placed_from_nbytes:
                    self._start = start
                    return
                self._start = self._end = 0
                self._place(header, payload_nbytes, staging[body:end])
                return
            start = after
            self.frames_in += 1
            if kind == _BYE:
                self._bye_received = True
            else:
                inbound.receive(self, header, staging[body:start])
        self._start = self._end = 0

    def _place(self, header: Header, nbytes: int, first: memoryview) -> None:
        placement = self._inbound.place(self, header, nbytes)
        view = placement.view
        if len(view) != nbytes:
            raise ValueError(f"a placement of {len(view)} bytes for a payload of {nbytes}")
        have = len(first)
        view[:have] = first
        self._placement = placement
        self._rest = view[have:]

    def _skip_some(self) -> None:
        """Skip the rest of a payload whose placement was disowned."""
        dropped = min(self._skip, self._end - self._start)
        self._start += dropped
        self._skip -= dropped
        self.frames_in += not self._skip

    def _unexpected(self, kind: int, payload_nbytes: int) -> RemoteProtocolError:
        what = f"{Kind(kind).name} with a payload of {payload_nbytes} bytes"
        return RemoteProtocolError(f"rank {self.peer} sent {what}{' after its BYE' if self._bye_received else ''}")

    # The end.

    @property
    def is_closing(self) -> bool:
        """Whether this side has said goodbye, or the link has ended: nothing more is sent."""
        return self._closing or self._fd < 0

    def close(self) -> None:
        """Say goodbye after what is queued. The peer's answers are read until it closes its side, too."""
        if self.is_closing:
            return
        # The socket is closed later: while bytes of the peer are unread, that would reset the connection, which can
        # destroy bytes that are still on their way to the peer.
        header = (_BYE,)
        self._outbox.put(header, self._encode(header), None, None)
        self._closing = True
        if not (self._writer_on or self._flushing):
            self._writer_on = True
            self._reactor.add_writer(self._fd, self._drain)

    @override
    def descriptors(self) -> tuple[int, ...]:
        return (self._fd,) if self._fd >= 0 else ()

    @override
    def abort(self) -> None:
        self._end_with(None)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed and ``Inbound.lost`` was called. May be cancelled."""
        await self._ended.wait()

    def _end_of_file(self) -> None:
        if self._bye_received or (self._closing and self._failure is None):
            self._end_with(None)
        else:
            self._end_with(TransportError(f"rank {self.peer} closed its connection without a goodbye"))

    def _broken(self, error: OSError) -> TransportError | None:
        return None if self._bye_received else broken(self.peer, error)

    def _end_with(self, error: BaseException | None) -> None:
        if self._fd < 0:
            return
        self._reactor.remove_reader(self._fd)
        self._reactor.remove_writer(self._fd)
        self._fd = -1
        self._sock.close()
        self._rest = self._placement = None
        self._outbox.clear(self._done)
        self._reactor.call_soon(self._report, error)

    def _report(self, error: BaseException | None) -> None:
        self._tell_owners()
        self._inbound.lost(self, error)
        self._ended.set()
