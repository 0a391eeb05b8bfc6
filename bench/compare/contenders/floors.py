"""The floors: what the machine itself needs for a part of the work, in all ranks at once. No library is involved."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import numpy as np

from bench.compare.contenders.base import Contender, Stopwatch, WrongResultError
from bench.compare.data import Array, Data
from bench.compare.works import Mode
from kfcomm.types import override

PIECE_NBYTES = 4 << 20
"""Of 64 KiB to 4 MiB, with one thread and with one for each direction, the fastest, and the cheapest in CPU time."""


class Copy(Contender):
    """Every rank copies its input to its output once."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self._ring = Ring(self.rank, self.size, Path(os.environ["COMPARE_MEETING"]))
        self._outputs: dict[str, list[Array]] = {}

    @override
    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        sets = data.prepare(calls)
        outputs = self._outputs.setdefault(data.work.name, [np.empty_like(one) for one in sets[0].arrays])
        self._ring.barrier()
        with Stopwatch() as watch:
            for one in sets:
                for array, output in zip(one.arrays, outputs, strict=True):
                    np.copyto(output, array)
        self._ring.barrier()
        if not sets[-1].holds(1.0, self.rank, outputs):
            raise WrongResultError("a copy is not what was copied")
        return watch

    @override
    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    @override
    def close(self) -> None:
        self._ring.close()


class Sockets(Contender):
    """Every rank sends to the next what a ring all_reduce of n ranks sends: 2(n-1)/n times the work's bytes.

    Over TCP, from the input's memory to another array's: no framing, no arithmetic, no step waits for another.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self._ring = Ring(self.rank, self.size, Path(os.environ["COMPARE_MEETING"]))
        self._outputs: dict[str, Array] = {}

    @override
    def turn(self, mode: Mode, data: Data, calls: int) -> Stopwatch:
        sets = data.prepare(calls)
        source = sets[0].flat
        output = self._outputs.setdefault(data.work.name, np.empty_like(source))
        nbytes = 2 * (self.size - 1) * source.nbytes // self.size
        self._ring.barrier()
        with Stopwatch() as watch:
            for one in sets:
                self._ring.stream(octets(one.flat), octets(output), nbytes)
        self._ring.barrier()
        before = (self.rank - 1) % self.size
        if nbytes >= source.nbytes and not np.array_equal(output, source - np.float32(self.rank - before)):
            raise WrongResultError("the bytes that came are not those of the rank before")
        return watch

    @override
    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    @override
    def close(self) -> None:
        self._ring.close()


class Ring:
    """TCP connections to the next rank and from the one before, over the loopback interface."""

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        self._rank = rank
        self._size = size
        with socket.create_server(("127.0.0.1", 0)) as server:
            _publish(meeting / f"{rank}", str(server.getsockname()[1]))
            port = _read_when_there(meeting / f"{(rank + 1) % size}")
            self._next = socket.create_connection(("127.0.0.1", int(port)))
            self._before, _ = server.accept()
        self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def barrier(self) -> None:
        """Two rounds of a token: after the first all have come, the second says so."""
        for _ in range(2):
            if self._rank == 0:
                self._next.sendall(b"x")
                self._before.recv(1)
            else:
                self._before.recv(1)
                self._next.sendall(b"x")

    def stream(self, source: memoryview, target: memoryview, nbytes: int) -> None:
        """Sends ``nbytes`` of ``source`` and receives as many into ``target``; at their ends they begin again."""
        self._next.setblocking(False)
        self._before.setblocking(False)
        poll = select.poll()
        poll.register(self._next, select.POLLOUT)
        poll.register(self._before, select.POLLIN)
        sent = received = 0
        while sent < nbytes or received < nbytes:
            before = sent + received
            sent += self._push(source, sent, nbytes)
            received += self._pull(target, received, nbytes)
            if sent == nbytes:
                poll.modify(self._next, 0)
            if received == nbytes:
                poll.modify(self._before, 0)
            if sent + received == before:
                poll.poll()
        self._next.setblocking(True)
        self._before.setblocking(True)

    def _push(self, source: memoryview, done: int, nbytes: int) -> int:
        if done == nbytes:
            return 0
        place = done % len(source)
        try:
            return self._next.send(source[place : place + min(PIECE_NBYTES, nbytes - done)])
        except BlockingIOError:
            return 0

    def _pull(self, target: memoryview, done: int, nbytes: int) -> int:
        if done == nbytes:
            return 0
        place = done % len(target)
        try:
            count = self._before.recv_into(target[place : place + min(PIECE_NBYTES, nbytes - done)])
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError("the rank before has gone")
        return count

    def close(self) -> None:
        """Hangs up."""
        self._next.close()
        self._before.close()


def octets(array: Array) -> memoryview:
    """The bytes of an array."""
    return array.view(np.uint8).data


def _publish(path: Path, text: str) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(text)
    whole.rename(path)


def _read_when_there(path: Path) -> str:
    pause = select.poll()
    while not path.exists():
        pause.poll(5)
    return path.read_text()
