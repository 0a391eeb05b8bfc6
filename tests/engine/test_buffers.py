import pytest

from kfcomm.engine.receiver import BLOCK_NBYTES, MAX_BLOCKS, BlockPool, Payload

SMALL = bytes(range(256))
DATA = SMALL * 1024
"""Large enough for a block of the pool."""


class Lender:
    """A link that lends what it shows, at most so often, and may write over it when it was given back."""

    def __init__(self, times, data=DATA):
        self.times = times
        self.memory = bytearray(data)
        self.lent = 0

    def lend(self):
        if self.lent == self.times:
            return None
        self.lent += 1
        return self.lent

    def give_back(self, loan):
        assert loan == self.lent
        self.lent -= 1
        self.memory[:] = bytes(len(self.memory))

    def shown(self):
        return Payload(memoryview(self.memory), lender=self)

    def call_ends(self):
        """The call in which the payload was shown returns."""
        if not self.lent:
            self.memory[:] = bytes(len(self.memory))


@pytest.fixture
def pool():
    return BlockPool()


def test_kept_chunk_is_borrowed_and_returned(pool):
    lender = Lender(1)
    payload = lender.shown()
    payload.keep(pool)
    lender.call_ends()
    assert payload.view == DATA
    assert lender.lent == 1
    payload.keep(pool)  # it lasts already
    assert lender.lent == 1
    payload.release(pool)
    payload.release(pool)
    assert lender.lent == 0
    assert not pool._free


def test_chunk_that_cannot_be_lent_is_copied(pool):
    lender = Lender(0)
    payload = lender.shown()
    payload.keep(pool)
    lender.call_ends()
    assert payload.view == DATA
    payload.release(pool)
    assert len(pool._free) == 1


@pytest.mark.parametrize("data", [SMALL, DATA])
@pytest.mark.parametrize("kept", [False, True])
def test_memory_read_by_a_link_is_copied_even_if_lent(kept, data, pool):
    lender = Lender(1, data)
    payload = lender.shown()
    if kept:
        payload.keep(pool)
    payload.forwarded(pool)
    view = payload.view
    lender.call_ends()
    payload.release(pool)
    assert lender.lent == 0
    assert view == data
    assert not pool._free  # the link may still read the block


@pytest.mark.parametrize("kept", [False, True])
def test_a_copy_lasts_and_its_block_is_used_again(kept, pool):
    lender = Lender(1)
    payload = lender.shown()
    if kept:
        payload.keep(pool)
    payload.copy(pool)
    payload.copy(pool)
    lender.call_ends()
    assert lender.lent == 0
    assert payload.view == DATA
    payload.release(pool)
    assert len(pool._free) == 1
    assert Payload.held(pool, len(DATA)).view.nbytes == len(DATA)
    assert not pool._free


def test_a_small_copy_is_borrowed_no_more(pool):
    lender = Lender(9, SMALL)
    payload = lender.shown()
    payload.copy(pool)
    view = payload.view
    payload.copy(pool)
    payload.keep(pool)
    assert payload.view is view
    assert lender.lent == 0
    payload.release(pool)
    assert view == SMALL


def test_borrowed_or_placed_memory_needs_no_release(pool):
    Lender(1).shown().release(pool)
    Payload(memoryview(bytearray(10)), owner=object()).release(pool)
    assert not pool._free


def test_few_blocks_are_kept(pool):
    blocks = [pool.take(BLOCK_NBYTES) for _ in range(MAX_BLOCKS + 3)]
    for block in [*blocks, pool.take(10), pool.take(BLOCK_NBYTES + 1)]:
        pool.give(block)
    assert len(pool._free) == MAX_BLOCKS
