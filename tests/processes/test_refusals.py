"""A refused rank gets the reason at once, garbage connections get nowhere, and both leave the others intact."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kfcomm.errors import ConfigError, RendezvousError
from tests.processes import garbage, roles
from tests.processes.stage import joined, start, unjoined


def test_refused_rank_gets_reason_and_may_retry() -> None:
    with unjoined(3) as world, contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        first, second, stranger = world
        port = taken.getsockname()[1]
        for actor in (first, second):
            message = actor.do(roles.join, interface="no-such-interface").failure(ConfigError).message
            assert "no-such-interface" in message
            assert "lo 127.0.0.1" in message
            message = actor.do(roles.join, transport="pigeon").failure(ConfigError).message
            assert "transport='pigeon' must be one of auto, tcp" in message
            message = actor.do(roles.join, strategy="pyramid").failure(ConfigError).message
            assert "pyramid" in message
        message = first.do(roles.join, store=f"http://127.0.0.1:{port}", serve=True).failure(RendezvousError).message
        assert f"127.0.0.1:{port}" in message
        assert "in use" in message
        token = second.do(roles.join, token="another token than that of the job").failure(RendezvousError).message
        assert "token" in token
        with contextlib.closing(socket.socket()) as nobody:
            nobody.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            message = second.do(roles.join, store=url, timeout=0.5).failure(RendezvousError).message
            assert url.removeprefix("http://") in message

        disagreeing = [first.do(roles.join, rank=0, size=2), second.do(roles.join, rank=1, size=3)]
        for call in disagreeing:
            message = call.failure(RendezvousError).message
            assert "disagree on the size" in message
            assert "says 2" in message
            assert "says 3" in message

        calls = [first.do(roles.join, rank=0, size=2), second.do(roles.join, rank=1, size=2)]
        assert [call.result() for call in calls] == [[0, 2, 0, 0], [1, 2, 0, 0]]
        message = stranger.do(roles.join, rank=1, size=2).failure(RendezvousError).message
        assert "rank 1 is taken" in message
        assert f"pid {second.pid}" in message
        assert f"pid {stranger.pid}" in message
        sums = [call.result() for call in start((first, second), roles.all_reduce, name="x", elements=100_000)]
        assert len(set(sums)) == 1
        for call in start((first, second), roles.leave):
            call.result()


@pytest.mark.slow
def test_garbage_connections_do_not_disturb_job() -> None:
    with joined(3) as world:
        for _ in range(3):
            world.do(roles.all_reduce, name="x")
        here = world.do(roles.listening)
        # whatever is needed once, for the first of them, is there before the measurement
        garbage.knock(here[0], here[1], 400, seed=0)
        before = world[0].do(roles.memory, reset=True).result()
        working = world.start(roles.work)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: garbage.knock(here[0], here[1], 2500, seed), range(1, 5)))
        world[2].do(roles.stop).result()
        assert len({call.result() for call in working}) == 1
        after = world[0].do(roles.memory).result()
        assert after["peak"] - before["now"] < 16 << 20
        assert after["descriptors"] == before["descriptors"]
        assert len(set(world.do(roles.all_reduce, name="x", elements=100_000))) == 1
        world.finish()
