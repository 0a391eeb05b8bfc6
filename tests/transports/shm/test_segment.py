"""Segments of shared memory, and pieces of an arena."""

import fcntl
import gc
import mmap
import os
import platform
import socket
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.shm.segment import PIECE_NBYTES, SLAB_NBYTES, Arena, attach, create, pieces_in, why_unsupported
from tests.leaks import descriptors
from tests.transports.streams import noise

PAGE = mmap.PAGESIZE


def test_segment_is_shared():
    descriptor, mine = create("test", PAGE)
    theirs = attach(descriptor, PAGE, writable=True)
    os.close(descriptor)
    mine[5] = 7
    theirs[6] = 8
    assert theirs[:7] == mine[:7] == b"\0\0\0\0\0\7\10"


def test_read_only_mapping_cannot_be_written():
    descriptor, _ = create("test", PAGE)
    theirs = attach(descriptor, PAGE, writable=False)
    os.close(descriptor)
    with pytest.raises(TypeError):
        theirs[0] = 1


def test_a_segment_cannot_change_its_size():
    descriptor, _ = create("test", PAGE)
    for nbytes in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_unsealed_segment_is_not_mapped(seals):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(RemoteProtocolError, match="seals"):
        attach(descriptor, PAGE, writable=True)
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE + 1, 2 * PAGE, 1 << 40])
def test_a_segment_of_another_size_is_not_mapped(nbytes):
    descriptor, _ = create("test", PAGE)
    with pytest.raises(RemoteProtocolError, match=f"{PAGE} bytes.* {nbytes} were announced"):
        attach(descriptor, nbytes, writable=True)
    os.close(descriptor)


def test_other_descriptors_are_not_mapped(tmp_path):
    one, other = socket.socketpair()
    file = tmp_path / "file"
    file.write_bytes(bytes(PAGE))
    with one, other, file.open() as opened:
        for descriptor in (one.fileno(), opened.fileno()):
            with pytest.raises(RemoteProtocolError):
                attach(descriptor, PAGE, writable=False)


def test_memory_that_the_system_does_not_give():
    before = descriptors()
    with pytest.raises(TransportError, match="cannot share"):
        create("test", 1 << 62)
    assert descriptors() == before


def test_it_is_supported_here():
    assert why_unsupported() is None


def refuse(*_):
    raise OSError(1, "not today")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.delattr(os, "memfd_create"), "no memfd_create"),
        (lambda patch: patch.delattr(socket, "send_fds"), "cannot be passed"),
        (lambda patch: patch.setattr(platform, "machine", lambda: "aarch64"), "not ordered on aarch64"),
        (lambda patch: patch.setattr(sys, "maxsize", (1 << 31) - 1), "64-bit"),
        (lambda patch: patch.setattr(os, "memfd_create", refuse), "does not work here: Operation not permitted"),
    ],
    ids=["no memfd", "no descriptors", "another processor", "32 bits", "forbidden"],
)
def test_why_it_is_not(change, reason, monkeypatch):
    change(monkeypatch)
    assert reason in why_unsupported()


sizes = st.one_of(st.sampled_from([*PIECE_NBYTES, 1, 4097, SLAB_NBYTES - 1]), st.integers(1, SLAB_NBYTES))
NOISE = memoryview(noise(2 * SLAB_NBYTES))


def read(arena, piece, nbytes):
    return bytes(arena._view[piece : piece + nbytes])


class Pieces(RuleBasedStateMachine):
    """An arena against what was put into it."""

    shown = Bundle("shown")

    def __init__(self):
        super().__init__()
        self.arena = Arena(3)
        self.model = {}

    def teardown(self):
        for piece, (_, readers) in self.model.items():
            for _ in range(readers):
                self.arena.release(piece)
        assert self.arena.pieces_in_use == 0
        pieces = [self.arena.publish(NOISE[:SLAB_NBYTES]) for _ in range(4)]
        assert sorted(pieces[:3]) == [0, SLAB_NBYTES, 2 * SLAB_NBYTES]  # all of it has come back, in any cut
        assert pieces[3] is None
        self.arena.close()

    @rule(target=shown, nbytes=sizes, start=st.integers(0, SLAB_NBYTES), again=st.integers(0, 3))
    def publish(self, nbytes, start, again):
        payload = NOISE[start : start + nbytes]
        piece = self.arena.publish(payload)
        if piece is None:
            assert self.model
            return None
        assert piece not in self.model
        self.model[piece] = bytes(payload), 1
        for _ in range(again):
            assert self.arena.publish(payload) == piece
            self.model[piece] = bytes(payload), self.model[piece][1] + 1
        return piece

    @rule(target=shown, nbytes=sizes, is_wanted=st.booleans())
    def reserve(self, nbytes, is_wanted):
        payload = self.arena.reserve(nbytes)
        if payload is None:
            assert self.model
            return None
        payload[:] = NOISE[:nbytes]
        assert self.arena.is_there(payload)
        assert self.arena.is_reserved(payload)
        if not is_wanted:
            return None  # forgotten by itself
        piece = self.arena.publish(payload)
        assert piece not in self.model
        assert not self.arena.is_reserved(payload)
        self.model[piece] = bytes(payload), 1
        return piece

    @rule(piece=consumes(shown))
    def release(self, piece):
        if piece in self.model:
            for _ in range(self.model.pop(piece)[1]):
                self.arena.release(piece)

    @rule(piece=shown)
    def release_one(self, piece):
        if piece in self.model:
            data, readers = self.model.pop(piece)
            self.arena.release(piece)
            if readers > 1:
                self.model[piece] = data, readers - 1

    @invariant()
    def pieces_hold_what_they_held_and_do_not_overlap(self):
        assert self.arena.pieces_in_use == len(self.model)
        end = 0
        for piece, (data, _) in sorted(self.model.items()):
            assert piece >= end
            end = piece + len(data)
            assert end <= self.arena.nbytes
            assert piece // SLAB_NBYTES == (end - 1) // SLAB_NBYTES
            assert read(self.arena, piece, len(data)) == data


TestPieces = Pieces.TestCase
TestPieces.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.fixture
def arena():
    made = Arena(1)
    yield made
    made.close()


@pytest.mark.parametrize("nbytes", PIECE_NBYTES)
def test_a_slab_holds_as_many_pieces_as_fit(arena, nbytes):
    views = [NOISE[index : index + nbytes] for index in range(SLAB_NBYTES // nbytes)]
    pieces = [arena.publish(view) for view in views]
    assert len(set(pieces)) == len(pieces)
    assert all(read(arena, piece, nbytes) == view for piece, view in zip(pieces, views, strict=True))
    assert arena.publish(NOISE[:nbytes]) is None
    for piece in pieces:
        arena.release(piece)


@given(st.permutations(PIECE_NBYTES))
def test_a_slab_is_cut_anew_when_it_is_not_in_use(order):
    arena = Arena(1)
    for nbytes in order:
        piece = arena.publish(NOISE[:nbytes])
        assert piece is not None
        for other in set(order) - {nbytes}:
            assert arena.publish(NOISE[:other]) is None
        arena.release(piece)
    arena.close()


def test_the_piece_used_last_is_handed_out_first(arena):
    pieces = [arena.publish(NOISE[index : index + 8000]) for index in range(5)]
    arena.release(pieces[1])
    arena.release(pieces[3])
    assert arena.publish(NOISE[:5000]) == pieces[3]


def test_reserved_piece_is_not_copied(arena):
    made = arena.reserve(5000)
    made[:] = NOISE[:5000]
    piece = arena.publish(made)
    assert arena.publish(made) == piece  # for a second reader
    made[:] = NOISE[5000:10000]
    assert read(arena, piece, 5000) == NOISE[5000:10000]
    arena.release(piece)
    assert arena.pieces_in_use == 1
    arena.release(piece)
    assert arena.pieces_in_use == 0


def test_a_reserved_piece_is_free_again_when_something_else_comes_first(arena):
    for _ in range(3):
        forgotten = arena.reserve(SLAB_NBYTES)
        assert arena.pieces_in_use == 0
    piece = arena.publish(NOISE[:SLAB_NBYTES])
    assert not arena.is_there(forgotten)
    assert arena.reserve(1) is None
    arena.release(piece)


def test_one_copy_serves_all_who_are_shown_the_same_view(arena):
    view = NOISE[:5000]
    piece = arena.publish(view)
    assert arena.publish(view) == piece
    arena.release(piece)
    assert arena.publish(view) == piece
    arena.release(piece)
    arena.release(piece)
    assert arena.pieces_in_use == 0
    # nobody reads it any more: the view may show other bytes now
    other = arena.publish(NOISE[:6000])
    assert arena.publish(view) != other


def test_the_same_view_of_bytes_that_changed_is_copied_again_when_the_piece_came_back(arena):
    memory = bytearray(b"a" * 5000)
    view = memoryview(memory)
    arena.release(arena.publish(view))
    memory[:] = b"b" * 5000
    assert read(arena, arena.publish(view), 5000) == memory


def test_no_view_of_the_payload_is_kept(arena):
    memory = noise(5000)
    arena.publish(memoryview(memory))
    memory.clear()  # raises BufferError while anybody holds a view
    gc.collect()
    again = noise(5000)
    assert arena.publish(memoryview(again)) == arena._last_piece
    assert arena.pieces_in_use == 2


def test_closing_gives_back_the_memory_but_not_what_a_peer_has_mapped():
    arena = Arena(1)
    mapped = pieces_in(attach(arena.descriptor, arena.nbytes, writable=False))
    piece = arena.publish(NOISE[:5000])
    arena.close()
    arena.close()
    assert mapped[piece : piece + 5000] == NOISE[:5000]
    arena.release(piece)
    assert arena.pieces_in_use == 0


def test_piece_in_use_is_not_copied_again(arena):
    one, other = NOISE[:5000], NOISE[1:5001]
    piece, between = arena.publish(one), arena.publish(other)
    assert arena.is_there(one)
    assert not arena.is_reserved(one)
    assert arena.publish(one) == piece  # for a second reader
    arena.release(piece)
    assert arena.publish(other) == between
    arena.release(piece)
    assert not arena.is_there(one)  # both have read it
    arena.release(between)
    assert arena.is_there(other)
    arena.release(between)
    assert arena.pieces_in_use == 0
    assert not arena._shown
    assert not arena._payload_of


def test_a_payload_is_told_from_another_that_was_at_its_place(arena):
    pieces = []
    for start in range(50):  # each view is gone, and its identity free, when the next one is made
        pieces.append(arena.publish(NOISE[start : start + 5000]))
        gc.collect()
        assert read(arena, pieces[-1], 5000) == NOISE[start : start + 5000]
    assert len(set(pieces)) == 50
    for piece in (*pieces[::2], *reversed(pieces[1::2])):
        arena.release(piece)
    assert arena.pieces_in_use == 0
    assert not arena._shown
    assert not arena._payload_of


# To the next epoch


def inode(arena):
    return os.fstat(arena.descriptor).st_ino


def test_unread_arena_is_handed_on():
    arena = Arena(1)
    pieces = [arena.publish(NOISE[start : start + 5000]) for start in range(3)]
    for piece in pieces:
        arena.release(piece)
    where = inode(arena)
    after = arena.handed_on()
    assert (arena.descriptor, inode(after), after.num_slabs, after.nbytes) == (-1, where, 1, arena.nbytes)
    assert arena.publish(NOISE[:5000]) is None  # for the links of the former epoch
    assert arena.reserve(SLAB_NBYTES) is None
    assert arena.handed_on() is None
    arena.close()
    whole = after.publish(NOISE[:SLAB_NBYTES])
    assert read(after, whole, SLAB_NBYTES) == NOISE[:SLAB_NBYTES]
    assert read(after, whole, 5000) == NOISE[:5000]
    after.release(whole)
    after.close()


@pytest.mark.parametrize("keep", ["publish", "reserve"])
def test_arena_in_use_is_not_handed_on(arena, keep):
    kept = getattr(arena, keep)(NOISE[:5000] if keep == "publish" else 5000)
    assert arena.handed_on() is None
    assert arena.descriptor >= 0
    other = arena.publish(NOISE[1:5001])
    assert read(arena, other, 5000) == NOISE[1:5001]
    arena.release(other)
    arena.release(kept) if keep == "publish" else kept.release()
    after = arena.handed_on()
    assert after is not None
    after.close()


def test_arena_with_doubtful_reader_is_not_handed_on(arena):
    arena.is_doubtful = True
    assert arena.handed_on() is None
    assert arena.descriptor >= 0
