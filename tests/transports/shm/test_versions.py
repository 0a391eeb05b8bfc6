"""Versions of a blob that a peer reads in place: always whole, or not at all, whatever the owner does meanwhile."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays import HostArray
from kfcomm.arrays.kinds import NUMPY
from kfcomm.transports.shm.heap import Heaps, PeerHeap
from kfcomm.transports.shm.versions import PIECE_NBYTES, Directory, PeerDirectory

OWNER, READER = 0, 1
BIG = 3 * PIECE_NBYTES // 8


@dataclass
class Sides:
    """A directory as its owner and as a reader have it; ``page`` is the memory between them."""

    heaps: Heaps
    others: Heaps
    directory: Directory
    reader: PeerDirectory
    page: np.ndarray[Any, np.dtype[np.uint64]]

    def array(self, x: Any) -> HostArray:
        """A copy in the owner's heap."""
        x = np.asarray(x)
        if not x.nbytes:
            return HostArray(x.reshape(-1), x.shape, NUMPY, False)
        block = self.heaps.empty(x.nbytes)
        assert block is not None
        block.view(x.dtype)[:] = x.reshape(-1)
        return HostArray(block.view(x.dtype), x.shape, NUMPY, False)

    def show(self, **versions: Any) -> None:
        """List versions, called as ``v7``, and no others."""
        self.directory.show({int(name[1:]): self.array(x) for name, x in versions.items()})

    def read(self, version: int | None = None) -> Any:
        """Copy of the reader."""
        return ended(self.reader.reading(version))

    def close(self) -> None:
        self.heaps.close()
        self.others.close()
        self.__dict__.clear()  # the mappings end with what refers to them


def ended(pieces: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


@pytest.fixture
def sides() -> Iterator[Sides]:
    made = make_sides()
    yield made
    made.close()


def make_sides() -> Sides:
    mine, theirs = Heaps(OWNER), Heaps(READER)
    heap = mine.own()
    assert heap is not None
    theirs.add(OWNER, PeerHeap(os.dup(heap.descriptor)))
    directory = Directory.make(mine)
    assert directory is not None
    page = np.frombuffer(directory._bytes, np.uint64)
    return Sides(mine, theirs, directory, PeerDirectory(theirs, OWNER, directory.place, directory.key), page)


def test_latest_and_older_version_of_any_form(sides: Sides) -> None:
    assert sides.read() is None
    sides.show(v3=np.arange(6).reshape(2, 3), v4=np.float16(2.5))
    latest, older = sides.read(), sides.read(3)
    assert (latest.shape, latest.dtype, float(latest)) == ((), np.float16, 2.5)
    assert older.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert sides.read(5) is None
    sides.show(v9=np.empty((0, 3), np.complex64))
    assert (sides.read().shape, sides.read().dtype) == ((0, 3), np.complex64)
    assert sides.read(3) is None
    older[:] = -1  # a copy: the reader may write to it


def test_copy_outlives_its_version_and_grows(sides: Sides) -> None:
    for number in range(20):
        sides.show(v0=np.full(1 << number, number))
        found = sides.read()
        assert found.size == 1 << number
        assert (found == number).all()


def test_version_replaced_during_its_copy_is_read_again(sides: Sides) -> None:
    sides.show(v1=np.full(BIG, 1))
    pieces = sides.reader.reading(None)
    next(pieces)
    sides.show(v2=np.full(BIG, 2), v3=np.full(BIG, 3))
    filler = [sides.array(np.full(BIG, -1)) for _ in range(3)]  # takes the memory of version 1
    found = ended(pieces)
    assert (found == 3).all()
    assert filler[0].flat[0] == -1


def test_version_that_stays_listed_is_copied_once(sides: Sides) -> None:
    first, second = sides.array(np.full(BIG, 1)), sides.array(np.full(BIG, 2))
    sides.directory.show({1: first})
    pieces = sides.reader.reading(None)
    next(pieces)
    sides.directory.show({1: first, 2: second})
    assert (ended(pieces) == 1).all()


def test_version_saved_again_under_its_number_is_another_block(sides: Sides) -> None:
    sides.show(v1=np.full(BIG, 1))
    pieces = sides.reader.reading(1)
    next(pieces)
    sides.show(v1=np.full(BIG, 5))
    assert (ended(pieces) == 5).all()


def test_reading_is_bounded_while_the_owner_saves_faster(sides: Sides) -> None:
    pieces = sides.reader.reading(None)
    sides.show(v0=np.zeros(BIG))
    num_pieces = 0
    for _ in pieces:
        num_pieces += 1
        sides.show(v0=np.zeros(BIG))
    assert 0 < num_pieces < 100


def test_directory_left_half_written_is_not_read(sides: Sides) -> None:
    sides.show(v1=np.zeros(3))
    before = sides.read()
    sides.page[1] |= np.uint64(1)  # the owner died here
    assert before is not None
    assert sides.read() is None
    sides.show(v2=np.ones(3))  # it was only interrupted
    assert sides.read().tolist() == [1, 1, 1]


def test_block_outside_the_heap_is_listed_as_not_readable(sides: Sides) -> None:
    sides.directory.show({1: sides.array([1.0]), 2: HostArray(np.ones(3), (3,), NUMPY, False)})
    assert sides.read() is None  # not version 1, which is not the latest
    assert sides.read(1).tolist() == [1.0]


def test_closed_directory_is_not_read_whoever_has_its_page(sides: Sides) -> None:
    sides.show(v1=np.zeros(BIG))
    pieces = sides.reader.reading(None)
    next(pieces)
    image = bytes(sides.page)
    sides.directory.close()
    assert ended(pieces) is None
    assert sides.read() is None
    other = Directory(sides.heaps, np.frombuffer(sides.directory._bytes, np.uint8))
    other.show({1: sides.array([7.0])})
    assert sides.read() is None
    assert len(image) == mmap.PAGESIZE


@given(data=st.binary(max_size=200), nbytes=st.one_of(st.none(), st.integers(0, (1 << 64) - 1)))
def test_garbage_in_a_directory_is_as_if_nothing_were_there(data: bytes, nbytes: int | None) -> None:
    sides = make_sides()
    sides.page.view(np.uint8)[24 : 24 + len(data)] = np.frombuffer(data, np.uint8)
    sides.page[2] = len(data) if nbytes is None else nbytes
    sides.page[1] += np.uint64(2)
    found = sides.read()
    assert found is None or isinstance(found, np.ndarray)
    sides.close()


LENGTHS = st.one_of(st.integers(-3, 3), st.integers(1 << 45, 1 << 62))


@given(
    entry=st.tuples(
        st.integers(-5, 5),
        st.integers(-1, 3),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.sampled_from(["float64", "int8", "float128", "O", "", 3]),
        st.one_of(st.lists(LENGTHS, max_size=4), st.integers(), st.just([1] * 65)),
    )
)
def test_entries_out_of_bounds_are_not_read(entry: Any) -> None:
    sides = make_sides()
    data = msgpack.packb([entry])
    sides.page.view(np.uint8)[24 : 24 + len(data)] = np.frombuffer(data, np.uint8)
    sides.page[2], sides.page[1] = len(data), sides.page[1] + np.uint64(2)
    found = sides.read()
    assert found is None or found.nbytes < mmap.PAGESIZE
    sides.close()


def test_two_threads_read_and_one_saves(sides: Sides) -> None:
    """No copy is torn, and no reader sees an older version after a newer one."""
    sides.show(v0=np.zeros(10_000))
    failures: list[Any] = []
    is_over = threading.Event()

    def read() -> None:
        latest = 0.0
        while not is_over.is_set():
            found = sides.read()
            if found is None:
                continue
            if found.min() != found.max() or found[0] < latest:
                failures.append(found)
            latest = found[0]

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    kept: dict[int, HostArray] = {}
    for number in range(1, 2000):
        kept = {**kept, number: sides.array(np.full(10_000, float(number)))}
        for one in list(kept)[:-2]:
            del kept[one]
        sides.directory.show(kept)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures
