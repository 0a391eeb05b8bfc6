"""A rank that serves the store and closes while others continue: it names those it waits for, and can skip the wait."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.launch.launched import TOKEN, environ
from tests.support import free_port

RANK = """
import sys
import kfcomm
from kfcomm.rendezvous import join

join.KEPT_FOR_S = 3600.0
{before}
comm = kfcomm.sync.init()
print("joined", flush=True)
{body}
"""
GOES_ON = "sys.stdin.read()"
CLOSES = "comm.close()"
WAITS = "comm.barrier()"
WAITS_IN_WITH = "with comm: comm.barrier()"
SENDS = "comm.send(7, 1); comm.close()"
RECEIVES = "with comm: print(int(comm.recv(0)))"
CONNECTS_LATE = """
import asyncio
from kfcomm.engine.network import SocketNetwork

connect = SocketNetwork.connect

async def connect_late(network, peer):
    if peer == 0:
        await asyncio.to_thread(sys.stdin.readline)
    return await connect(network, peer)

SocketNetwork.connect = connect_late
"""


@contextlib.contextmanager
def pair(first: str, other: str = GOES_ON, before: str = "", **settings: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, started by hand; the first, which serves the store, does what it says, the other goes on."""
    store = f"http://127.0.0.1:{free_port()}"
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, body in enumerate((first, other)):
            env = environ(KFCOMM_SIZE="2", KFCOMM_RANK=str(rank), KFCOMM_STORE=store, KFCOMM_TOKEN=TOKEN, **settings)
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK.format(before=before, body=body)], env=env, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        for one in ranks:
            assert one.stdout is not None
            assert one.stdout.readline() == "joined\n"
        yield ranks
    finally:
        for one in ranks:
            one.kill()
            one.communicate()


def test_it_says_for_whom_it_waits_and_ctrl_c_ends_the_wait() -> None:
    with pair(CLOSES) as (first, _):
        assert first.stderr is not None
        assert "rank 0: close() waits for rank 1 to close too" in first.stderr.readline()
        first.send_signal(signal.SIGINT)
        assert first.wait() == -signal.SIGINT


@pytest.mark.parametrize("body", [WAITS, WAITS_IN_WITH])
def test_interrupted_rank_does_not_wait_for_others(body: str) -> None:
    with pair(body) as (first, _):
        first.send_signal(signal.SIGINT)
        assert first.wait() == -signal.SIGINT


def test_close_does_not_wait_for_dead_rank() -> None:
    with pair(WAITS) as (first, other):
        other.kill()
        assert first.stderr is not None
        assert "PeerLost" in first.stderr.read()
        assert first.wait() == 1


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
def test_rank_waiting_to_send_stays_reachable(transport: str) -> None:
    with pair(SENDS, RECEIVES, CONNECTS_LATE, KFCOMM_TRANSPORT=transport) as (first, other):
        assert first.stderr is not None
        assert "close() waits for rank 1 to receive a message" in first.stderr.readline()
        assert other.communicate("now\n") == ("7\n", "")
        assert other.returncode == 0
        assert first.communicate() == ("", "")
        assert first.returncode == 0
