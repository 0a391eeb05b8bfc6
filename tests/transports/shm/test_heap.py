"""Symmetric memory: it is an array's for as long as there is a view of it, and then another's."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.shm import heap as heaps
from kfcomm.transports.shm.heap import NOWHERE, Heap, Heaps, PeerHeap

PAGE = mmap.PAGESIZE


@pytest.fixture
def heap() -> Iterator[Heap]:
    made = Heap()
    yield made
    made.close()


def taken(heap: Heap, nbytes: int) -> Any:
    block = heap.empty(nbytes)
    assert block is not None
    return block


def test_it_is_free_when_the_last_view_is_gone(heap: Heap) -> None:
    block = taken(heap, 3 * PAGE)
    place = heap.place_of(block)
    view = block[PAGE:].view(np.float32).reshape(-1, 2)[::2]
    del block
    gc.collect()
    assert (heap.num_arrays, heap.used_nbytes) == (1, 3 * PAGE)
    assert heap.place_of(taken(heap, PAGE)) != place
    del view
    assert (heap.num_arrays, heap.used_nbytes) == (0, 0)
    assert heap.place_of(taken(heap, 3 * PAGE)) == place


def test_place_of_array(heap: Heap) -> None:
    assert heap.place_of(np.empty(3)) == NOWHERE
    block = taken(heap, 2 * PAGE)
    other = taken(heap, 1)
    assert heap.place_of(block[8:16].view(np.int64)) == heap.place_of(block) + 8
    assert heap.place_of(other) not in (NOWHERE, heap.place_of(block))
    assert heap.place_of(np.empty(3)) == NOWHERE
    assert len(taken(heap, 0)) == 0


def test_a_peer_reads_it_where_it_is(heap: Heap) -> None:
    block = taken(heap, 64)
    block.view(np.float32)[:] = range(16)
    peer = PeerHeap(os.dup(heap.descriptor))
    assert peer.map()
    seen = peer.array(heap.place_of(block), np.dtype(np.float32), 16)
    assert seen.tolist() == list(range(16))
    assert not seen.flags.writeable
    assert peer.map_writable()
    peer.array(heap.place_of(block), np.dtype(np.float32), 16, writable=True)[5] = -2
    assert block.view(np.float32)[5] == -2
    block.view(np.float32)[3] = -1
    assert seen[3] == -1
    for at, count in ((-8, 1), (1 << 62, 1), (0, 1 << 62)):
        with pytest.raises(RemoteProtocolError, match="an array of"):
            peer.array(at, np.dtype(np.float32), count)
    del seen
    peer.close()


def test_closed_peer_heap_is_not_mapped(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, broken = PeerHeap(os.dup(heap.descriptor)), PeerHeap(os.dup(heap.descriptor))
    closed.close()
    assert not closed.map()
    with pytest.raises(RemoteProtocolError):
        closed.array(0, np.dtype(np.float32), 1)

    def refused(*_: Any, **__: Any) -> Any:
        raise RemoteProtocolError("no room")

    monkeypatch.setattr(heaps, "attach", refused)
    assert not broken.map()
    assert broken.descriptor == -1


def test_a_heap_that_cannot_be_had_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Heap()
    late.close()
    assert late.empty(5) is None

    def refused(*_: Any) -> int:
        raise OSError("no memory")

    monkeypatch.setattr(heaps, "make", refused)
    nothing = Heaps(0)
    assert nothing.own() is None
    assert nothing.empty(4) is None
    assert nothing.place_of(np.empty(1)) == NOWHERE
    assert not nothing.map([0, 1])
    assert nothing.map([0])
    nothing.close()


def test_one_that_cannot_be_mapped_gives_nothing(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(heaps.mmap, "mmap", refused)
    assert heap.empty(1) is None


def test_a_full_heap_gives_nothing_until_something_ends(heap: Heap) -> None:
    heap._nbytes = 4 * PAGE
    first, second = taken(heap, PAGE), taken(heap, 3 * PAGE)
    assert heap.empty(1) is None
    del first
    assert heap.empty(2 * PAGE) is None
    assert heap.empty(PAGE) is not None
    del second


def test_more_than_is_kept_goes_back_to_the_system(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "KEPT_NBYTES", 64 * PAGE)
    for _ in range(20):
        taken(heap, 50 * PAGE)[:] = 1
    assert os.fstat(heap.descriptor).st_blocks * 512 == 50 * PAGE
    blocks = [taken(heap, 30 * PAGE) for _ in range(5)]
    for block in blocks:
        block[:] = 1
    del block, blocks
    assert os.fstat(heap.descriptor).st_blocks * 512 <= 64 * PAGE
    assert heap._free == [] or all(
        one + room < other for (one, room), (other, _) in zip(heap._free, heap._free[1:], strict=False)
    )


def test_as_much_as_is_in_use_is_kept(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two sets of arrays that take turns would give all their pages back each time."""
    monkeypatch.setattr(heaps, "KEPT_NBYTES", PAGE)
    held = [taken(heap, 20 * PAGE) for _ in range(4)]
    others = [taken(heap, 20 * PAGE) for _ in range(4)]
    for block in held + others:
        block[:] = 1
    del block
    others.clear()
    assert os.fstat(heap.descriptor).st_blocks * 512 == 160 * PAGE
    held.clear()
    assert os.fstat(heap.descriptor).st_blocks * 512 <= PAGE


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=60), st.integers(0, 8))
def test_no_two_arrays_are_in_the_same_memory(steps: list[tuple[int, int]], kept: int) -> None:
    heap = Heap()
    monkeypatch = pytest.MonkeyPatch()
    try:
        monkeypatch.setattr(heaps, "KEPT_NBYTES", kept * PAGE)
        held: dict[int, Any] = {}
        for number, (pages, end) in enumerate(steps):
            held[number] = taken(heap, pages * PAGE)
            held[number][:] = number
            held.pop(end, None)
            assert all((block == one).all() for one, block in held.items())
            assert heap.num_arrays == len(held)
        most = heap._top
        held.clear()
        assert heap.used_nbytes == 0
        assert sum(room for _, room in (*heap._free, *heap._kept)) == most
    finally:
        monkeypatch.undo()
        heap.close()


def test_any_thread_may_drop_the_last_view(heap: Heap) -> None:
    def use() -> None:
        for number in range(300):
            block = taken(heap, (number % 5 + 1) * PAGE)
            block[:8] = number % 256
            assert (block[:8] == number % 256).all()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heap._settle()
    assert heap.num_arrays == 0


def test_threads_that_ask_for_it_at_once_get_the_same_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Heaps(0)
    both, descriptors, given, make = threading.Barrier(2), [], [], heaps.make

    def slowly(name: str, nbytes: int) -> int:
        both.wait()
        descriptors.append(make(name, nbytes))
        return descriptors[-1]

    monkeypatch.setattr(heaps, "make", slowly)
    threads = [threading.Thread(target=lambda: given.append(made.own())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert given[0] is given[1] is made.own()
    assert made.descriptors() == [given[0].descriptor]
    made.close()
    for descriptor in descriptors:  # that of who came second was closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_array_freed_during_allocation_is_reclaimed(heap: Heap) -> None:
    """A collector may run at any line, also while the lock is held."""
    block = taken(heap, PAGE)
    with heap._lock:
        del block
        assert heap.num_arrays == 1
    assert heap.empty(1) is not None
    assert heap.num_arrays == 0


def test_loan_stays_until_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "MAX_LOANS", 3)
    own = Heaps(0)
    over: set[int] = set()
    loans = [own.lend(100, over.__contains__) for _ in range(3)]
    assert [loan.number for loan in loans if loan is not None] == [1, 2, 3]
    assert own.lend(100, over.__contains__) is None
    over.add(2)
    assert own.lend(100, over.__contains__) is None  # the next number is that of the first, which is still held
    over |= {1, 3}
    fourth = own.lend(100, over.__contains__)
    assert fourth is not None
    assert fourth.number == 4
    del loans, fourth
    over.add(4)
    own.settle()
    heap = own.own()
    assert heap is not None
    assert heap.num_arrays == 0
    own.close()


def test_a_forked_child_frees_nothing_and_takes_nothing(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "KEPT_NBYTES", 0)
    block = taken(heap, 3 * PAGE)
    block[:] = 7
    child = os.fork()
    if not child:
        del block
        gc.collect()
        os._exit(0 if heap.empty(1) is None and heap.num_arrays == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (block == 7).all()
    del block
    assert os.fstat(heap.descriptor).st_blocks == 0


def test_a_peer_shows_its_heap_once_on_each_link(heap: Heap) -> None:
    both = Heaps(0)
    first, second = (PeerHeap(os.dup(heap.descriptor)) for _ in range(2))
    both.add(1, first)
    both.add(1, second)
    assert second.descriptor == -1
    assert both.descriptors() == [first.descriptor]
    assert both.map([0, 1])
    both.forget(1)
    assert first.descriptor == -1
    with pytest.raises(RemoteProtocolError, match="rank 1 is not there any more"):
        both.array(1, 0, np.dtype(np.float32), 1)
    both.close()
    assert both.descriptors() == []
