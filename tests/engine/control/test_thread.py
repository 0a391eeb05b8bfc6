from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading

import pytest

from kfcomm.core.frame import Kind, make_encoder
from kfcomm.core.gossip import Body
from kfcomm.core.handshake import Identity, Keys, Purpose
from kfcomm.engine.control import GONE, addresses_of, node
from kfcomm.engine.control.links import ControlLinks
from kfcomm.errors import LocalProtocolError
from kfcomm.transports.sockets import DialRefused
from tests.engine.control.fakes import ABORT, LEAVE_S, Info, planes
from tests.support import half_close
from tests.transports.streams import opened, sealed

OPS = [(b"group", f"grad/{index}", 0) for index in range(150)]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_an_abort_reaches_everybody_else_once(size, unix):
    async with planes(size, unix=unix) as world:
        for rank in range(size):
            world.threads[rank].abort(b"group", f"by {rank}", 0, ABORT[3])
        await world.until(lambda: all(len(engine.aborts) >= size - 1 for engine in world.engines))
        await settled(world)
        for engine in world.engines:
            expected = [f"by {rank}" for rank in range(size) if rank != engine.rank]
            assert sorted(key for _, key, _, _ in engine.aborts) == expected
            assert not engine.lost


async def settled(world):
    """Everything that was under way has arrived: a question to all was answered by all, from everywhere."""
    for engine in world.engines:
        engine.answers.clear()
        world.threads[engine.rank].query([], -1, engine.answered)
    await world.until(lambda: all(len(engine.answers) == len(world.engines) - 1 for engine in world.engines))


@pytest.mark.asyncio
async def test_the_whole_story_of_an_abort_arrives_cut_to_what_fits():
    async with planes(2) as world:
        ranks = [0, 1] * 1000
        world.threads[0].abort(*ABORT[:3], ["timeout", 0, "é" * 10_000, ranks, ranks])
        world.threads[0].abort(*ABORT)
        await world.until(lambda: len(world.engines[1].aborts) == 2)
        (_, _, _, cause), exact = world.engines[1].aborts
        assert exact == ABORT
        assert cause == ["timeout", 0, "é" * 2048, ranks[:1024], ranks[:1024]]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_a_rank_that_dies_is_lost_to_everybody_once(size, unix):
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with planes(size, unix=unix) as world:
        await settled(world)
        world.die(1)
        await world.until(lambda: all(1 in engine.lost for engine in world.engines))
        await alive(world, {1})
        for engine in world.engines:
            assert engine.lost == {1: 1}
        assert "scripted death" in world.engines[1].reasons[0]
        (context,) = unheard
        assert isinstance(context["exception"], ExceptionGroup)


async def alive(world, dead):
    """Each survivor still hears an abort of each other."""
    survivors = [engine for engine in world.engines if engine.rank not in dead]
    before = {engine.rank: len(engine.aborts) for engine in survivors}
    for engine in survivors:
        world.threads[engine.rank].abort(*ABORT)
    expected = len(survivors) - 1
    await world.until(lambda: all(len(engine.aborts) - before[engine.rank] == expected for engine in survivors))


@pytest.mark.asyncio
async def test_survivors_whose_neighbours_all_died_find_each_other():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with planes(8) as world:
        await settled(world)
        dead = {1, 2, 4, 6, 7}  # all the neighbours of rank 0; 3 and 5 are left
        for rank in dead:
            world.die(rank)
        survivors = world.everybody_but(*dead)
        await world.until(lambda: all(set(engine.lost) == dead for engine in survivors))
        await alive(world, dead)
        assert all(set(engine.lost.values()) == {1} for engine in survivors)


@pytest.mark.asyncio
async def test_a_rank_that_stops_without_leaving_is_lost():
    async with planes(3) as world:
        await settled(world)
        world.threads[2].stop()
        await world.until(lambda: all(engine.lost for engine in world.everybody_but(2)))
        assert not world.engines[2].lost


@pytest.mark.asyncio
async def test_an_exit_seen_by_the_launcher_is_a_loss():
    async with planes(4) as world:
        await settled(world)
        world.threads[0].declare_lost(3, "the process of rank 3 ended with code -9")
        await world.until(lambda: world.engines[0].lost)  # else it may hear of it from rank 1 first
        world.threads[1].declare_lost(3, "because")
        world.threads[1].declare_lost(1, "never oneself")
        world.threads[1].suspect(1, "never oneself")
        await world.until(lambda: all(engine.lost == {3: 1} for engine in world.engines))
        # The rank itself hears that it was given up, and nobody lets it in again.
        with pytest.raises(DialRefused, match="declared lost"):
            await world.dial(3, 0, Purpose.DATA)
        await alive(world, {3})
        assert all(engine.lost == {3: 1} for engine in world.engines)
        assert any("ended with code -9" in reason for reason in world.engines[0].reasons)


@pytest.mark.asyncio
@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_lost_rank_that_returns_at_the_end_is_notified(unix):
    async with planes(4, unix=unix, started=False, lost_after_s=[1.0] * 3) as world:
        for thread in world.threads[:3]:
            thread.start()
        world.threads[1].declare_lost(3, "silent")
        await world.until(lambda: all(engine.lost == {3: 1} for engine in world.engines[:3]))
        for thread in world.threads[:3]:
            thread.linger()
        for rank, purpose in ((1, Purpose.CONTROL), (3, Purpose.DATA)):
            with pytest.raises(DialRefused, match="epoch is over") as caught:
                await world.dial(rank, 0, purpose)
            assert not caught.value.has_no_listener
        world.threads[3].start()
        await world.until(lambda: world.engines[3].lost)
        assert (world.engines[3].lost, world.engines[3].reasons) == ({3: 1}, ["silent"])
        assert all(engine.lost == {3: 1} for engine in world.engines)  # they need each other no more
        assert not any(engine.ended for engine in world.engines)


@pytest.mark.asyncio
async def test_a_broken_link_between_living_ranks_is_dialled_again():
    async with planes(2) as world:
        await settled(world)
        for _ in range(3):
            (descriptor, *_) = world.threads[0]._node.links.descriptors()
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
            await settled(world)
        await alive(world, set())
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_a_peer_that_is_stopped_is_not_lost():
    resume = threading.Event()
    async with planes(2, handshake_timeout_s=0.05) as world:
        try:
            await settled(world)
            world.threads[1]._post(resume.wait)
            world.threads[0].suspect(1, "its data link broke")
            await world.until(lambda: world.records.has("no decision on rank 1"))
            world.threads[0].abort(*ABORT)
        finally:
            resume.set()
        await world.until(lambda: world.engines[1].aborts)
        await alive(world, set())
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_a_peer_that_is_silent_is_lost_and_hears_of_it():
    """Rank 1 is stuck. Only rank 0 has a short ``lost_after_s``; it tells the others, and rank 1 when that resumes."""
    resume = threading.Event()
    async with planes(3, lost_after_s=[1.0]) as world:
        try:
            await settled(world)
            world.threads[1]._post(resume.wait)
            await world.until(lambda: all(engine.lost[1] for engine in world.everybody_but(1)))
        finally:
            resume.set()
        await world.until(lambda: world.engines[1].lost[1])
        assert all("silent for" in engine.reasons[0] for engine in world.everybody_but(1))


@pytest.mark.asyncio
async def test_heartbeats_are_answered():
    """A peer that has nothing to say is there all the same: as many beats are answered as were asked for."""
    async with planes(2, lost_after_s=[60.0]) as world:
        await settled(world)
        node = world.threads[0]._node
        answers = []
        here = asyncio.get_running_loop()
        node.heard = lambda rank: (answers.append(rank), here.call_soon_threadsafe(world.notes.changed))
        for asked in range(3):
            world.threads[0]._post(node.links.send, 1, (Kind.PING,))
            await world.until(lambda asked=asked: len(answers) > asked)
        assert set(answers) == {1}


@pytest.mark.asyncio
async def test_a_suspect_that_answers_is_alive():
    async with planes(8) as world:
        await settled(world)
        world.threads[0].suspect(3, "no neighbour, but its data link broke")
        await world.until(lambda: 3 in world.threads[0]._node._gossip.linked or changed_later(world))
        await settled(world)
        assert not any(engine.lost for engine in world.engines)


def changed_later(world):
    """An engine hears of no link event: look again on the loop's next turn."""
    asyncio.get_running_loop().call_soon(world.notes.changed)
    return False


@pytest.mark.asyncio
async def test_a_question_is_answered_while_the_engine_is_busy():
    busy = asyncio.new_event_loop()  # never runs: an engine that computes for ever
    try:
        async with planes(3, loops={1: busy}) as world:
            world.engines[1].posted = set(OPS[::2])
            world.threads[0].query(OPS, 1, world.engines[0].answered)
            await world.until(lambda: world.engines[0].answers)
            assert world.engines[0].answers == [(1, [True, False] * 75, "rank 1 is thinking")]
    finally:
        busy.close()


@pytest.mark.asyncio
async def test_questions_to_all_and_to_oneself():
    async with planes(4) as world:
        for engine in world.engines:
            engine.posted = {OPS[engine.rank]}
        asker = world.engines[1]
        world.threads[1].query(OPS[:4], -1, asker.answered)
        await world.until(lambda: len(asker.answers) == 3)
        assert sorted(asker.answers) == [
            (rank, [rank == at for at in range(4)], f"rank {rank} is thinking") for rank in (0, 2, 3)
        ]
        asker.answers.clear()
        world.threads[1].query(OPS[:2], 1, asker.answered)
        await world.until(lambda: asker.answers)
        assert asker.answers == [(1, [False, True], "rank 1 is thinking")]


@pytest.mark.asyncio
async def test_a_question_to_a_rank_that_dies_is_dropped():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with planes(2) as world:
        world.die(1)
        world.threads[0].query(OPS, 1, world.engines[0].answered)
        await world.until(lambda: 1 in world.engines[0].lost)
        world.threads[0].query(OPS, 1, world.engines[0].answered)
        world.threads[0].query(OPS, 0, world.engines[0].answered)
        await world.until(lambda: world.engines[0].answers)
        assert not world.threads[0]._node._questions.about(1)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 5, 8])
async def test_all_leave_at_once(size):
    async with planes(size) as world:
        await asyncio.gather(*(thread.leave(LEAVE_S) for thread in world.threads))
        for thread in world.threads:
            thread.stop()
        assert not any(engine.lost for engine in world.engines)
        assert all(len(engine.left) == len(set(engine.left)) for engine in world.engines)


@pytest.mark.asyncio
async def test_leaving_rank_names_several_others_in_one_message(monkeypatch):
    """A flood of each leaving rank would take 16 · 16 · 7 messages, and another one of its question as many again."""
    size, num_links = 16, 16 * 7
    sent = []
    send = ControlLinks.send
    monkeypatch.setattr(
        ControlLinks, "send", lambda links, rank, header: (sent.append(header), send(links, rank, header))
    )
    monkeypatch.setattr(node, "GATHERED_S_PER_RANK", 0.02)
    monkeypatch.setattr(node, "ASK_S_PER_RANK", 0.5)
    monkeypatch.setattr(node, "MOST_PATIENCE_S", 8.0)
    async with planes(size) as world:
        await alive(world, set())
        sent.clear()
        await asyncio.gather(*(thread.leave(LEAVE_S) for thread in world.threads))
        kinds = [header[3][0] for header in sent if header[0] == Kind.GOSSIP]
        assert Body.QUERY not in kinds
        assert kinds.count(Body.LEAVING) < 8 * num_links


@pytest.mark.asyncio
async def test_leaving_rank_asks_those_that_stay():
    async with planes(10) as world:
        for leaver in range(2):
            await world.threads[leaver].leave(LEAVE_S)
        for engine in world.engines[2:]:
            await world.until(lambda engine=engine: sorted(engine.left) == [0, 1])
        await asyncio.gather(*(thread.leave(LEAVE_S) for thread in world.threads[2:]))
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_few_ranks_that_stay_release_the_others_unasked(monkeypatch):
    sent = []
    send = ControlLinks.send
    monkeypatch.setattr(
        ControlLinks, "send", lambda links, rank, header: (sent.append(header), send(links, rank, header))
    )
    monkeypatch.setattr(node, "RELEASED_S_PER_RANK", 1e-3)
    monkeypatch.setattr(node, "MOST_PATIENCE_S", LEAVE_S)
    monkeypatch.setattr(node, "GATHERED_S_PER_RANK", 1e-3)
    async with planes(12) as world:
        await asyncio.gather(*(thread.leave(LEAVE_S) for thread in world.threads[:9]))
        kinds = {header[3][0] for header in sent if header[0] == Kind.GOSSIP}
        assert Body.RELEASE in kinds
        await asyncio.gather(*(thread.leave(LEAVE_S) for thread in world.threads[9:]))
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 5, 8])
async def test_ranks_leave_one_by_one_and_answer_to_the_last(size):
    async with planes(size) as world:
        for leaver in range(size - 1):
            staying = world.engines[leaver + 1 :]
            world.engines[leaver].posted = set(OPS[::3])
            for engine in staying:
                engine.pending = OPS
            await world.threads[leaver].leave(LEAVE_S)
            world.threads[leaver].stop()
            for engine in staying:
                await world.until(lambda engine=engine, seen=leaver: len(engine.answers) > seen)
                assert engine.answers[leaver] == (leaver, [True, False, False] * 50, f"rank {leaver} is thinking")
                assert engine.left == list(range(leaver + 1))
            await alive(world, set(range(leaver + 1)))
        await world.threads[-1].leave(LEAVE_S)
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_a_rank_leaves_in_the_end_although_no_peer_asks():
    busy = asyncio.new_event_loop()
    try:
        async with planes(2, loops={1: busy}) as world:
            await world.threads[0].leave(0.01)
            while not world.threads[1]._node.is_gone(0):  # noqa: ASYNC110  its node tells nobody
                await asyncio.sleep(0.001)
            world.threads[0].stop()
            world.threads[1].declare_lost(0, "its process ended with code 0")  # left in good order: no loss
            world.threads[1].query([], 1, world.engines[1].answered)
            busy.call_later(0, lambda: None)
            while not world.engines[1].answers:
                busy.call_soon(busy.stop)
                await asyncio.to_thread(busy.run_forever)
            assert world.engines[1].left == [0]
            assert not world.engines[1].lost
    finally:
        busy.close()


@pytest.mark.asyncio
async def test_a_rank_that_has_left_and_does_not_answer_has_posted_nothing(monkeypatch):
    monkeypatch.setattr(node, "ASK_AGAIN_S", (0.01, 0.01))
    async with planes(2) as world:
        await world.threads[0].leave(LEAVE_S)
        world.threads[0].stop()
        asker = world.engines[1]
        await world.until(lambda: asker.answers)
        world.threads[1].query(OPS, 0, asker.answered)
        await world.until(lambda: len(asker.answers) == 2)
        assert asker.answers[1] == (0, [False] * 150, GONE)
        assert not world.threads[1]._node._questions.about(0)


@pytest.mark.asyncio
async def test_leaving_ends_with_the_loss_of_who_was_waited_for_and_with_the_plane():
    busy = asyncio.new_event_loop()
    try:
        async with planes(2, loops={1: busy}) as world:
            leaving = asyncio.ensure_future(world.threads[0].leave(LEAVE_S))
            world.threads[0].declare_lost(1, "it is")
            await leaving
        async with planes(2, loops={1: busy}) as world:
            leaving = asyncio.ensure_future(world.threads[0].leave(LEAVE_S))
            await asyncio.sleep(0)
            world.threads[0].stop()
            await leaving
            await world.threads[0].leave(LEAVE_S)
    finally:
        busy.close()


@pytest.mark.asyncio
async def test_a_data_connection_is_handed_over_ready_to_use():
    async with planes(2) as world:
        dialled = await world.dial(1, 0, Purpose.DATA)
        with dialled.sock as mine:
            await world.until(lambda: world.engines[0].adopted)
            adopted, rank = world.engines[0].adopted[0]
            assert rank == 1
            sock = adopted.sock
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(mine, b"chunk")
            assert await loop.sock_recv(sock, 100) == b"chunk"
            await loop.sock_sendall(sock, b"credit")
            assert await loop.sock_recv(mine, 100) == b"credit"


@pytest.mark.asyncio
@pytest.mark.parametrize("state", ["closed", "never runs"])
async def test_a_data_connection_that_no_engine_takes_is_closed(state):
    other = asyncio.new_event_loop()
    if state == "closed":
        other.close()
    try:
        async with planes(2, loops={0: other}) as world:
            dialled = await world.dial(1, 0, Purpose.DATA)
            with dialled.sock as mine:
                if state != "closed":
                    await world.until(lambda: world.threads[0]._upcalls._offered or changed_later(world))
                    world.threads[0].stop()
                assert await asyncio.get_running_loop().sock_recv(mine, 1) == b""
    finally:
        other.close()


GARBAGE = {
    "nothing": b"",
    "text": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "zeros": bytes(64),
    "a huge frame": b"\xff" * 64,
    "a chunk": make_encoder()([Kind.CHUNK, 0, 0, 0, 0, 0, 0, 0]),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_costs_its_connection_only(name):
    async with planes(2) as world:
        await settled(world)
        loop = asyncio.get_running_loop()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", world.infos[0].port)) as stranger:
                stranger.setblocking(False)
                await loop.sock_sendall(stranger, GARBAGE[name])
                half_close(stranger)
                assert len(await closed(stranger)) < 1000
        await settled(world)
        assert not any(engine.lost or engine.adopted for engine in world.engines)


async def closed(sock):
    """Everything received until the other side closes."""
    came = b""
    while True:
        try:
            more = await asyncio.get_running_loop().sock_recv(sock, 1000)
        except ConnectionResetError:
            return came
        if not more:
            return came
        came += more


BAD = {
    "fields that do not fit": [Kind.GOSSIP, 1, 0, [Body.ABORT]],
    "a loss of an unknown rank": [Kind.GOSSIP, 1, 0, [Body.LOST, 9, "", False]],
    "a frame of data links": [Kind.CREDIT, 1, 1],
    "an unknown frame": [99],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", BAD)
async def test_a_peer_that_breaks_the_protocol_loses_its_link_only(name):
    async with planes(2) as world:
        await settled(world)
        dialled = await world.dial(1, 0, Purpose.CONTROL)
        with dialled.sock as mine:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(mine, sealed(dialled.keys, [Kind.PING], BAD[name]))
            await closed(mine)
        await settled(world)
        assert not any(engine.lost or engine.aborts for engine in world.engines)


FORGED = {
    "not sealed": lambda keys: 2 * make_encoder()([Kind.PING]),
    "sealed with another key": lambda keys: sealed(Keys(keys.incoming, keys.outgoing), [Kind.PING]),
    "a payload": lambda keys: sealed(keys, [Kind.CHUNK, 0, 0, 0, 0, 0, 0, 0], payload=bytes(1000)),
    "a changed byte": lambda keys: sealed(keys, [Kind.PING])[:-1] + b"?",
    "a repeated frame": lambda keys: 2 * sealed(keys, [Kind.PING]),
    "frames in another order": lambda keys: swapped(sealed(keys, [Kind.PING], [Kind.PING])),
}


def swapped(data):
    return data[len(data) // 2 :] + data[: len(data) // 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_frame_costs_its_link_only(name):
    async with planes(2) as world:
        await settled(world)
        dialled = await world.dial(1, 0, Purpose.CONTROL)
        with dialled.sock as mine:
            await asyncio.get_running_loop().sock_sendall(mine, FORGED[name](dialled.keys))
            await closed(mine)
        await settled(world)
        assert not any(engine.lost or engine.aborts for engine in world.engines)


@pytest.mark.asyncio
async def test_news_that_was_lost_with_one_of_two_links_goes_by_the_other():
    async with planes(2) as world:
        await settled(world)
        dialled = await world.dial(1, 0, Purpose.CONTROL)
        links = world.threads[0]._node.links
        await world.until(lambda: len(links._links[1]) == 2 or changed_later(world))
        world.threads[0].abort(*ABORT)
        with dialled.sock as mine:
            while True:  # the newest link has it, and breaks
                if await asyncio.get_running_loop().sock_recv(mine, 1000):
                    break
        await world.until(lambda: world.engines[1].aborts)
        assert world.engines[1].aborts[0][:3] == ABORT[:3]


STRANGERS = {
    "another token": {"token": b"another"},
    "another epoch": {"epoch": 4},
    "another process": {"me": Identity(1, "uid of another")},
    "the rank itself": {"me": Identity(0, "uid 0")},
    "a rank outside": {"me": Identity(2, "uid 2")},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("purpose", Purpose)
async def test_unauthenticated_peers_are_refused(name, purpose):
    async with planes(2) as world:
        with pytest.raises(DialRefused) as caught:
            await world.dial(1, 0, purpose, **STRANGERS[name])
        assert not caught.value.has_no_listener
        await settled(world)
        assert not any(engine.lost or engine.adopted for engine in world.engines)


@pytest.mark.asyncio
async def test_a_defect_in_a_callback_is_reported_and_the_plane_goes_on():
    heard = []
    async with planes(2) as world:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: (heard.append(context["exception"]), world.notes.changed())
        )
        world.threads[0].abort(b"group", "key", 0, ["too", "few"])
        await world.until(lambda: heard)
        assert isinstance(heard[0], ValueError)
        assert world.records.has("in the control thread of rank 0")
        await settled(world)


@pytest.mark.asyncio
async def test_more_links_than_needed_are_closed():
    async with planes(2) as world:
        await settled(world)
        dialled = [await world.dial(1, 0, Purpose.CONTROL) for _ in range(3)]
        ended = await closed(dialled[0].sock)
        assert opened(dialled[0].keys, ended)[-1] == [Kind.BYE]
        for one in dialled:
            one.close()
        await alive(world, set())
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_a_peer_that_does_not_read_is_dropped_and_told_later():
    resume = threading.Event()
    async with planes(2, handshake_timeout_s=0.05) as world:
        try:
            await settled(world)
            world.threads[1]._post(resume.wait)
            long = ["internal", 0, "x" * 4000, [], []]
            for index in range(3000):
                world.threads[0].abort(b"group", "x" * 4000, index, long)
            await world.until(lambda: not world.threads[0]._node._gossip.linked or changed_later(world))
        finally:
            resume.set()
        await world.until(lambda: any(seq == 2999 for _, _, seq, _ in world.engines[1].aborts))
        assert not any(engine.lost for engine in world.engines)


@pytest.mark.asyncio
async def test_descriptors_are_all_that_the_thread_holds():
    before = open_sockets()
    async with planes(1) as world:
        await settled(world)
        held = set(world.threads[0].descriptors())
        opened = open_sockets() - before
        # The end of the loop's own socket pair that it writes to keeps nobody waiting.
        assert held <= opened
        assert len(opened - held) == 1
        assert {sock.fileno() for sock in world.threads[0]._listener.sockets} <= held
    assert world.threads[0].descriptors() == []


def open_sockets():
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "anon_inode:")):
            found.add(int(number))
    return found


@pytest.mark.asyncio
async def test_descriptors_of_links_are_among_them():
    async with planes(2) as world:
        await settled(world)
        (descriptor, *_) = world.threads[0]._node.links.descriptors()
        assert descriptor in world.threads[0].descriptors()


@pytest.mark.asyncio
async def test_a_thread_is_started_once_and_stopped_as_often_as_one_likes():
    async with planes(1, started=False) as world:
        thread = world.threads[0]
        thread.abort(*ABORT)
        await thread.leave(LEAVE_S)
        thread.start()
        with pytest.raises(LocalProtocolError):
            thread.start()
        thread.stop()
        thread.stop()
        thread.abort(*ABORT)
        thread.query([], 0, world.engines[0].answered)
    async with planes(1, started=False) as world:
        world.threads[0].stop()
        with pytest.raises(LocalProtocolError):
            world.threads[0].start()


def test_addresses():
    here = Info(0, "a", "10.0.0.1", 1, None, "host a")
    near = Info(1, "b", "10.0.0.1", 2, "\0name", "host a")
    far = Info(2, "c", "10.0.0.2", 3, "@name", "host b")
    assert addresses_of(near, seen_from=here) == ("@name", ("10.0.0.1", 2))
    assert addresses_of(far, seen_from=here) == (("10.0.0.2", 3),)
    assert addresses_of(here, seen_from=near) == (("10.0.0.1", 1),)
