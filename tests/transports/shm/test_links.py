import asyncio

import pytest

from kfcomm.core.frame import MAX_HEADER_NBYTES
from kfcomm.errors import LocalProtocolError, TransportError
from kfcomm.transports.shm.ring import MAX_LENT_NBYTES, Word
from kfcomm.transports.shm.segment import SLAB_NBYTES
from kfcomm.transports.shm.sender import INLINE_NBYTES, LOW_LATENCY_WINDOW_NBYTES, WINDOW_NBYTES
from tests.support import on_every_loop
from tests.transports.shm.pairs import HALF, MIB, Pair, fill, linked, processes, settled, turns
from tests.transports.streams import Owner, chunk, noise

CREDIT = 6


@pytest.mark.asyncio
async def test_a_chunk_without_payload_is_one_with_an_empty_payload():
    async with linked() as pair:
        assert pair.link.send(chunk(0))
        assert pair.link.send(chunk(1), memoryview(b""))
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 2)
        assert pair.heard.frames == [(chunk(0), b""), (chunk(1), b"")]


@pytest.mark.asyncio
async def test_one_payload_shown_to_two_peers_is_copied_once():
    async with processes() as (here, there):
        pairs = [Pair(here, there, peers=(peer, 0)) for peer in (1, 2)]
        view = memoryview(HALF)
        for pair in pairs:
            assert pair.link.send(chunk(1), view)
        assert here.arena.pieces_in_use == 1
        for pair in pairs:
            pair.link.flush()
            await pair.heard.until(lambda heard: heard.frames)
            assert pair.heard.frames == [(chunk(1), HALF)]
        await settled(pairs[0])
        for pair in pairs:
            await pair.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [100, 1 << 16])
async def test_the_memory_of_a_payload_that_was_read_is_the_callers(nbytes):
    async with linked() as pair:
        memory = noise(nbytes)
        before = bytes(memory)
        assert pair.link.send(chunk(0), memoryview(memory))
        memory[:] = bytes(nbytes)
        memory.clear()  # raises BufferError while anything holds a view
        pair.link.flush()
        await pair.heard.until(lambda heard: heard.frames)
        assert pair.heard.frames == [(chunk(0), before)]


@pytest.mark.asyncio
async def test_the_same_view_again_waits_until_the_peer_has_read_it():
    async with linked() as pair:
        view = memoryview(HALF)
        assert pair.link.send(chunk(0), view)
        assert not pair.link.send(chunk(1), view, owner := Owner())
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 2)
        assert pair.heard.frames == [(chunk(0), HALF), (chunk(1), HALF)]
        assert owner.times == 1


# What waits


@on_every_loop
async def test_owners_are_told_neither_in_send_nor_twice_and_their_memory_is_free_then():
    async with linked() as pair:
        fill(pair.link)
        memory = noise(MIB)
        before = bytes(memory)
        owner = Owner(memory.clear)
        assert not pair.link.send(chunk(99), memoryview(memory), owner)
        assert owner.times == 0
        pair.link.flush()
        assert owner.times == 0
        await pair.heard.until(lambda heard: (chunk(99), before) in heard.frames)
        await settled(pair)
        assert owner.times == 1
        assert not memory


@on_every_loop
async def test_withdrawing_frees_the_memory_of_what_waits_and_names_it():
    async with linked() as pair:
        count = fill(pair.link)
        mine, theirs = noise(MIB), noise(MIB)
        gone, stays = Owner(), Owner()
        pair.link.send(chunk(100), memoryview(mine), gone)
        pair.link.send(chunk(101), memoryview(theirs), stays)
        pair.link.send(chunk(102), memoryview(mine), gone, 5)
        assert pair.link.withdraw(gone) == [chunk(102), chunk(100)]
        mine.clear()
        assert pair.link.withdraw(gone) == []
        assert pair.other.withdraw(gone) == ()
        await pair.heard.until(lambda heard: len(heard.frames) == count + 1)
        await settled(pair)
        assert pair.heard.frames[-1] == (chunk(101), theirs)
        assert (gone.times, stays.times) == (0, 1)


@pytest.mark.asyncio
async def test_an_urgent_chunk_overtakes_those_that_wait_and_only_those():
    async with linked() as pair:
        count = fill(pair.link)
        for index, priority in enumerate([0, -1, 5, 0, 7, 5]):
            assert not pair.link.send(chunk(100 + index), memoryview(HALF), Owner(), priority)
        assert pair.link.send(chunk(200), memoryview(b"small"), priority=8)
        assert not pair.link.send(chunk(201), memoryview(b"small"), Owner(), 7)
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == count + 8)
        order = [header[1] for header, _ in pair.heard.frames]
        assert order == [*range(count), 200, 104, 201, 102, 105, 100, 103, 101]


@pytest.mark.asyncio
async def test_definitions_go_ahead_of_chunks():
    async with linked() as pair:
        count = fill(pair.link)
        assert not pair.link.send(chunk(100), memoryview(HALF), Owner())
        signatures = [[4, index, ["x" * 4000] * 14] for index in range(10)]  # more than the ring holds
        for signature in signatures:
            assert pair.link.send(signature)
        assert not pair.link.send(chunk(101), memoryview(b"small"), Owner(), 9)
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == count + 12)
        frames = [header for header, _ in pair.heard.frames]
        assert frames == [*(chunk(index) for index in range(count)), *signatures, chunk(101), chunk(100)]


@pytest.mark.asyncio
async def test_a_number_that_gets_another_meaning_overtakes_nothing_that_knows_the_old_one():
    async with linked() as pair:
        first, second, question = [4, 1, ["first"]], [4, 1, ["second"]], [2, 0, 0, 1, 0]
        pair.link.send(first)
        count = fill(pair.link)
        for index, priority in enumerate([0, 5, 0]):
            assert not pair.link.send(chunk(100 + index), memoryview(HALF), Owner(), priority)
        assert pair.link.send(second)
        assert pair.link.send(question)
        assert not pair.link.send(chunk(200), memoryview(b"small"), Owner(), 9)
        assert pair.link.send(second)
        assert not pair.link.send(chunk(201), memoryview(b"small"), Owner(), 10)
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == count + 9)
        rest = [chunk(101), chunk(100), chunk(102), second, question, chunk(200), second, chunk(201)]
        assert [header for header, _ in pair.heard.frames] == [first, *(chunk(i) for i in range(count)), *rest]


@pytest.mark.asyncio
async def test_a_payload_or_frame_too_large_is_a_misuse():
    async with linked() as pair:
        with pytest.raises(LocalProtocolError, match="payload"):
            pair.link.send(chunk(0), memoryview(bytes(SLAB_NBYTES + 1)))
        with pytest.raises(LocalProtocolError, match="header"):
            pair.link.send([4, 1, ["x" * MAX_HEADER_NBYTES]])
        assert pair.link.is_idle


# Lending


class Keeping:
    """Borrows every chunk of a pair for longer, if it may."""

    def __init__(self, pair):
        self.link = pair.other
        self.loans = []
        self.refused = 0
        pair.heard.on_frame = self.keep

    def keep(self, link, header):
        loan = link.lend()
        if loan is None:
            self.refused += 1
        else:
            assert link.lend() is None  # once is enough
            self.loans.append(loan)

    def give_back(self):
        while self.loans:
            self.link.give_back(self.loans.pop())


@pytest.mark.asyncio
async def test_some_pieces_are_lent_and_a_window_of_others_goes_on():
    async with linked() as pair:
        keeping = Keeping(pair)
        for index in range(40):
            pair.link.send(chunk(index), memoryview(HALF)[:])
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 40)
        assert len(keeping.loans) == MAX_LENT_NBYTES // len(HALF)
        assert keeping.refused == 40 - len(keeping.loans)
        keeping.give_back()
        await settled(pair)
        assert fill(pair.link) == WINDOW_NBYTES // len(HALF)


@pytest.mark.asyncio
async def test_loans_do_not_block_low_latency_link():
    async with linked() as pair:
        keeping = Keeping(pair)
        pair.link.set_low_latency()
        pair.link.set_low_latency()
        for index in range(20):
            pair.link.send(chunk(index), memoryview(HALF)[:])
        pair.link.send(chunk(20), memoryview(noise(SLAB_NBYTES)))  # more than the window
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 21)
        assert len(keeping.loans) == 2
        keeping.give_back()
        await settled(pair)


@pytest.mark.asyncio
async def test_no_more_than_a_small_window_is_ahead_on_a_low_latency_link():
    async with linked() as pair:
        count = fill(pair.link)
        pair.link.set_low_latency()  # from now on: what was sent has to be read first
        assert not pair.link.send(chunk(100), memoryview(HALF), Owner())
        await pair.heard.until(lambda heard: len(heard.frames) == count + 1)
        await settled(pair)
        assert fill(pair.link) == LOW_LATENCY_WINDOW_NBYTES // len(HALF)
        pair.words[Word.LENT] = (1 << 64) - 1  # believed only as far as may be
        assert fill(pair.link) <= MAX_LENT_NBYTES // len(HALF)
        pair.words[Word.LENT] = 0


@pytest.mark.asyncio
@pytest.mark.parametrize("max_lent", [0, 3])
async def test_no_more_pieces_are_lent_than_the_publisher_can_spare(max_lent):
    async with linked(max_lent=max_lent) as pair:
        keeping = Keeping(pair)
        for index in range(40):
            pair.link.send(chunk(index), memoryview(HALF)[:5000])
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 40)
        assert len(keeping.loans) == max_lent
        keeping.give_back()
        await settled(pair)


@pytest.mark.asyncio
async def test_bytes_that_are_lent_do_not_change():
    async with linked() as pair:
        views = []

        def receive(link, header, payload):
            if link.lend() is not None:
                views.append((payload, bytes(payload)))
            type(pair.heard).receive(pair.heard, link, header, payload)

        pair.heard.receive = receive
        for index in range(200):
            pair.link.send(chunk(index), memoryview(noise(5000 * (1 + index % 3))))
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 200)
        assert len(views) == 8
        for view, before in views:
            assert view == before


@pytest.mark.asyncio
async def test_only_arena_payloads_are_lent_during_the_call():
    async with linked() as pair:
        keeping = Keeping(pair)
        pair.link.send(chunk(0), memoryview(HALF)[:INLINE_NBYTES])
        pair.link.flush()
        await pair.heard.until(lambda heard: heard.frames)
        assert keeping.refused == 1
        assert pair.other.lend() is None
        assert pair.link.lend() is None
        pair.link.give_back(None)
        pair.link.disown(None)


@pytest.mark.asyncio
async def test_loan_may_be_returned_within_the_call():
    async with linked() as pair:
        pair.heard.on_frame = lambda link, header: link.give_back(link.lend())
        for index in range(40):
            pair.link.send(chunk(index), memoryview(HALF)[:])
        pair.link.flush()
        await pair.heard.until(lambda heard: len(heard.frames) == 40)
        await settled(pair)


@pytest.mark.asyncio
async def test_an_arena_that_is_used_up_is_enough_for_many_links():
    async with processes(slabs=2) as (here, there):
        pairs = [Pair(here, there, max_lent=0, peers=(peer, 0)) for peer in range(1, 9)]
        owner = Owner()
        read = sum(pair.link.send(chunk(index), memoryview(HALF)[:], owner) for index in range(20) for pair in pairs)
        assert read == 2 * MIB // len(HALF)
        for pair in pairs:
            await pair.heard.until(lambda heard: len(heard.frames) == 20)
            assert [header for header, _ in pair.heard.frames] == [chunk(index) for index in range(20)]
        await settled(pairs[0])
        assert read + owner.times == 160
        for pair in pairs:
            await pair.close()


# The end


@pytest.mark.asyncio
async def test_the_receiver_may_close_alone():
    async with linked() as pair:
        pair.other.send([CREDIT, 2, 0])
        pair.other.close()
        await pair.ended()
        assert pair.notes.frames == [([CREDIT, 2, 0], b"")]
        assert pair.notes.ends == pair.heard.ends == [None]


@on_every_loop
@pytest.mark.parametrize("who", ["publisher", "subscriber"])
@pytest.mark.parametrize("waits", [False, True])
async def test_peer_that_is_given_up_while_both_live_is_a_loss_on_both_sides(who, waits):
    async with linked() as pair:
        if waits:
            fill(pair.link)
            pair.link.send(chunk(99), memoryview(HALF), owner := Owner())
        if who == "publisher":
            pair.other._keeper.peer_lost(0)
        else:
            pair.link._keeper.peer_lost(1)
        await pair.ended()
        for ends in (pair.notes.ends, pair.heard.ends):
            assert isinstance(ends[0], TransportError)
        await turns(3)
        if waits:
            assert owner.times == 1
        pair.link._keeper.reclaim()
        assert pair.link._arena.pieces_in_use == 0


@on_every_loop
async def test_a_peer_that_is_gone_has_its_last_words_read_whatever_else_fails():
    async with linked() as pair:
        for index in range(2):
            pair.link.send(chunk(index), memoryview(HALF)[:])
        pair.link.abort()
        pair.other.send([CREDIT, 1, 1])
        pair.other.ring_bell()
        pair.words[pair.other._far] = 1  # as if the peer had died at rest: its bell cannot be rung
        pair.other.owes_bell = True
        pair.other.ring_bell()
        await pair.ended()
        assert len(pair.heard.frames) == 2


@pytest.mark.asyncio
async def test_piece_that_was_returned_is_free_when_its_link_is_aborted():
    async with linked(slabs=1) as pair:
        hub, arena = pair.link._keeper, pair.link._arena
        pair.link.send(chunk(0), memoryview(HALF))
        pair.link.flush()
        while pair.other.poll():
            pass
        assert pair.heard.frames
        assert arena.pieces_in_use == 1
        pair.link.abort()
        hub.reclaim(1)
        assert arena.pieces_in_use == 0
        assert not arena.is_doubtful


@pytest.mark.asyncio
async def test_a_piece_is_not_used_again_after_a_broken_link_until_the_peer_says_so():
    async with linked(slabs=1) as pair:
        hub, arena = pair.link._keeper, pair.link._arena
        keeping = Keeping(pair)
        pair.link.send(chunk(0), memoryview(noise(MIB)))
        pair.link.flush()
        await pair.heard.until(lambda heard: heard.frames)
        pair.link._keeper.peer_lost(1)
        await pair.ended()
        hub.reclaim()
        assert arena.pieces_in_use == 1
        assert arena.publish(memoryview(HALF)) is None
        keeping.give_back()
        hub.reclaim()
        assert arena.pieces_in_use == 0
        assert not hub._ended
        assert not arena.is_doubtful


@pytest.mark.asyncio
async def test_pieces_of_gone_peer_are_freed():
    async with processes() as (here, there):
        one, two = Pair(here, there, peers=(1, 0)), Pair(here, there, peers=(1, 0))
        for pair in (one, two):
            Keeping(pair)
            pair.link.send(chunk(0), memoryview(HALF)[:])
            pair.link.flush()
            await pair.heard.until(lambda heard: heard.frames)
        one.link.abort()
        assert here.arena.pieces_in_use == 2
        here.hub.reclaim(7)
        assert here.arena.pieces_in_use == 2
        here.hub.reclaim(1)
        assert here.arena.pieces_in_use == 1
        two.link.abort()  # noticed only now
        assert here.arena.pieces_in_use == 0
        assert here.arena.is_doubtful  # it may live all the same, and read
        await one.close()
        await two.close()


@pytest.mark.asyncio
async def test_pieces_are_not_free_while_the_call_that_ended_the_link_still_reads_them():
    async with linked() as pair:
        closed = []

        def end(link, header):
            link.abort()
            pair.link.abort()
            closed.append(pair.link.may_reuse())

        pair.heard.on_frame = end
        pair.link.send(chunk(0), memoryview(HALF))
        pair.link.flush()
        await pair.ended()
        assert closed == [False]
        assert pair.link.may_reuse()


# What is wrong on one link ends that one


@on_every_loop
@pytest.mark.parametrize("side", ["sender", "receiver", "owner"])
async def test_a_defect_of_the_user_ends_the_link_is_not_hidden_and_stops_no_other(side):
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context["exception"]))

    def fail(*_):
        raise ZeroDivisionError

    async with processes() as (here, there):
        bad, good = Pair(here, there, peers=(1, 0)), Pair(here, there, peers=(2, 0))
        if side == "owner":
            fill(bad.link)
            bad.link.send(chunk(99), memoryview(HALF), Owner(fail))
        elif side == "sender":
            bad.notes.on_frame = fail
            bad.other.send([CREDIT, 1, 1])
            bad.other.flush()
        else:
            bad.heard.on_frame = fail
            bad.link.send(chunk(1))
            bad.link.flush()
        await bad.ended()
        assert len(unheard) == 1
        assert isinstance(unheard[0], ZeroDivisionError)
        assert unheard[0] in (bad.notes.ends + bad.heard.ends)
        for index in range(10):
            good.link.send(chunk(index), memoryview(HALF)[:])
            good.other.send([CREDIT, index, 0])
        good.link.flush()
        good.other.flush()
        await good.heard.until(lambda heard: len(heard.frames) == 10)
        await good.notes.until(lambda notes: len(notes.frames) == 10)
        await good.close()


@pytest.mark.asyncio
async def test_a_severed_link_touches_neither_the_memory_nor_the_loop():
    async with processes() as (here, there):
        pair = Pair(here, there)
        keeping = Keeping(pair)
        pair.link.send(chunk(0), memoryview(HALF))
        pair.link.flush()
        await pair.heard.until(lambda heard: heard.frames)
        here.hub.sever()
        there.hub.sever()
        before = pair.words.tobytes(), pair.shared.returned.tobytes(), pair.shared._forth.tobytes()
        # what a forked child may still call
        keeping.give_back()
        for link in (pair.link, pair.other):
            assert link.send(chunk(1), memoryview(HALF))
            link.flush()
            link.close()
            link.abort()
            assert not link.poll()
        here.hub.wake()
        assert not here.hub.progress()
        await turns(5)
        assert (pair.words.tobytes(), pair.shared.returned.tobytes(), pair.shared._forth.tobytes()) == before
        assert not pair.notes.ends


@pytest.mark.asyncio
async def test_a_window_that_opens_though_no_piece_came_free_is_used():
    """A piece with two readers: one is done with it, and what waits for that one goes on."""
    async with processes(slabs=16) as (here, there):
        first, second = Pair(here, there, peers=(1, 0)), Pair(here, there, peers=(2, 0))
        kept = []
        second.heard.on_frame = lambda link, header: kept.append((link, link.lend()))
        shown = memoryview(noise(MIB))
        for pair in (first, second):
            assert pair.link.send(chunk(0), shown)
        assert not first.link.send(chunk(1), memoryview(noise(MIB)), Owner())  # the window is one piece
        for pair in (first, second):
            pair.link.flush()
        await first.heard.until(lambda heard: len(heard.frames) == 2)
        await second.heard.until(lambda heard: heard.frames)
        for link, loan in kept:
            link.give_back(loan)
        await first.close()
        await second.close()
