"""A running job can be watched by its user: it is found, it answers whatever its loop does, and it leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kfcomm
from kfcomm.common import sockets
from kfcomm.common.sockets import Credentials
from kfcomm.monitor.live import Job, Question, job_name, jobs, read
from kfcomm.monitor.relaying import Relayed, relayed
from kfcomm.monitor.serving import MAX_AT_ONCE, Attendant
from tests.launch.launched import environ

HEAD = "Num       RefCount Protocol Flags    Type St Inode Path\n"
PROGRAM = """
import sys, kfcomm
with kfcomm.sync.init() as comm:
    comm.barrier("here")
    print("here", flush=True)
    sys.stdin.read()
"""


def mine() -> Job | None:
    """The job of this process, a world of one."""
    found = [job for job in jobs() if job.name == f"pid-{os.getpid()}"]
    return found[0] if found else None


def line(path: str, flags: int = 0x10000) -> str:
    return f"0000000000000000: 00000002 00000000 {flags:08X} 0001 01 12345 {path}\n"


def test_jobs_are_found_by_the_names_of_their_sockets() -> None:
    uid = os.getuid()
    listing = HEAD + "".join(
        [
            line(f"@kfcomm-live/{uid}/b/1/77.0"),
            line(f"@kfcomm-live/{uid}/b/0/76.0"),
            line(f"@kfcomm-live/{uid}/a/3/70.1"),
            line(f"@kfcomm-live/{uid}/b/0/76.0", flags=0),  # somebody is connected to it
            line(f"@kfcomm-live/{uid + 1}/c/0/5.0"),  # somebody else's
            line(f"@kfcomm-live/{uid}/d/x/5.0"),
            line(f"@kfcomm-live/{uid}/e/0"),
            line(f"@kfcomm-live/{uid}/e/0/x"),
            line("@kfcomm-0123-4567"),
            line("/run/other"),
            "0000000000000000: 00000002 00000000 00000000 0001 01 12345\n",
        ]
    )
    first, second = jobs(listing)
    assert (first.name, first.ranks, first.pids) == ("a", (3,), (70,))
    assert second == Job("b", ((0, f"kfcomm-live/{uid}/b/0/76.0"), (1, f"kfcomm-live/{uid}/b/1/77.0")))


def test_without_that_file_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKETS", "/proc/net/no-such-file")
    assert jobs() == ()


def test_a_job_is_called_after_its_launcher_its_store_or_its_process() -> None:
    assert job_name("0123456789abcdef" * 4, "http://10.0.0.1:5") == "0123456789abcdef" * 2
    assert job_name(None, "http://[fd00::1]:29600") == "-fd00-1-29600"
    assert job_name("a/b c", None) == "a-b-c"
    assert job_name(None, None) == f"pid-{os.getpid()}"


@pytest.mark.asyncio
async def test_a_world_of_one_answers_although_its_loop_is_busy() -> None:
    async with kfcomm.init() as comm:
        await comm.all_reduce(np.ones(3), "x")
        job = mine()
        assert job is not None
        (said,) = read(job)  # which blocks this loop until the answer is there
        assert (said.rank, said.size, [one.name for one in said.keys]) == (0, 1, ["x"])
        async with kfcomm.init() as other:
            await other.barrier()
            both = mine()
            assert both is not None
            assert both.ranks == (0, 0)
            assert len(read(both)) == 2
    assert mine() is None
    assert read(job) == []


def test_monitoring_can_be_switched_off() -> None:
    with kfcomm.sync.init(monitor=False) as comm:
        comm.barrier()
        assert mine() is None


def test_a_rank_whose_meter_was_turned_off_says_nothing() -> None:
    with kfcomm.sync.init() as comm:
        comm._inner._session.engine.meter = None
        job = mine()
        assert job is not None
        assert read(job) == []


@pytest.mark.parametrize("side", ["kfcomm.monitor.live", "kfcomm.common.sockets"])
def test_only_the_users_own_processes_are_answered_and_believed(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with kfcomm.sync.init():
        job = mine()
        assert job is not None
        with monkeypatch.context() as patch:
            patch.setattr(f"{side}.credentials_of", lambda sock: Credentials(os.getpid(), os.getuid() + 1, 0))
            assert read(job) == []
        assert len(read(job)) == 1


def test_malformed_answer_is_left_out() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"kfcomm-test-{os.getpid()}"
        listener.bind("\0" + name)
        listener.listen()
        for said in (b"", b"{}", b"[1", b'{"time_s": 1}', b"[]"):
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(read, Job("x", ((0, name),)))
                with listener.accept()[0] as sock:
                    sock.sendall(said)
                assert answer.result() == []


def test_malformed_relayed_answer_is_left_out() -> None:
    with kfcomm.sync.init():
        job = mine()
        assert job is not None
        assert relayed(job.sockets[0][1], [0, 1], Question.FIGURES) == {}  # a world of one
    assert relayed(job.sockets[0][1], [1], Question.FIGURES) == {}  # has ended
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"kfcomm-test-{os.getpid()}"
        listener.bind("\0" + name)
        listener.listen()
        head = b'{"rank":1,"epoch":0,"process":1,"gone":false,"nbytes":%d}\n'
        for said, found in (
            (b'{"time_s": 1}\n', {}),  # of an older version, to a question that it does not know
            (b"[1", {}),
            (head % 4 + b"null", {}),  # monitoring is off there
            (head % 0, {1: Relayed(0, 1, False, None)}),
            (head % 2 + b"{}", {1: Relayed(0, 1, False, {})}),
        ):
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(relayed, name, [1], Question.USAGE)
                with listener.accept()[0] as sock:
                    assert sock.recv(100) == b">u\x01\0\0\0"
                    sock.sendall(said)
                assert answer.result() == found


def test_killed_process_leaves_no_socket() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        (job,) = [job for job in jobs() if job.name == f"pid-{process.pid}"]
        assert [one.name for one in read(job)[0].keys] == ["here"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not [job for job in jobs() if job.name == f"pid-{process.pid}"]
        assert read(job) == []


# ---------------------------------------------------------------- the thread that answers


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """Address of an attendant."""
    listener = socket.socket(socket.AF_UNIX)
    path = str(tmp_path / "s")
    listener.bind(path)
    listener.listen(MAX_AT_ONCE + 8)
    yield path, listener
    listener.close()


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    return sock


def test_silent_client_delays_no_other_and_is_closed_at_the_end(place: tuple[str, socket.socket]) -> None:
    path, listener = place

    def echo(sock: socket.socket) -> None:
        sock.sendall(sock.recv(100))

    attendant = Attendant(listener, echo, "echo")
    with connected(path) as silent, connected(path) as other:
        other.sendall(b"hello")
        assert other.recv(100) == b"hello"
        assert other.recv(100) == b""
        assert set(attendant.descriptors()) >= {listener.fileno()}
        attendant.stop()
        assert silent.recv(1) == b""
    assert attendant.descriptors() == []


def test_for_one_too_many_the_oldest_is_hung_up_on(place: tuple[str, socket.socket]) -> None:
    path, listener = place
    attendant = Attendant(listener, lambda sock: sock.sendall(sock.recv(1)), "few")
    many = [connected(path) for _ in range(MAX_AT_ONCE + 1)]
    assert many[0].recv(1) == b""
    many[-1].sendall(b"!")
    assert many[-1].recv(1) == b"!"
    attendant.stop()
    for sock in many:
        sock.close()


def test_silent_client_has_no_thread_and_closed_ones_free_their_place(place: tuple[str, socket.socket]) -> None:
    path, listener = place
    attendant = Attendant(listener, lambda sock: sock.sendall(sock.recv(1)), "silent")
    silent = [connected(path) for _ in range(MAX_AT_ONCE - 1)]
    while len(attendant.descriptors()) < MAX_AT_ONCE:  # the listener's, too
        time.sleep(0.001)
    assert [one for one in threading.enumerate() if one.name == "silent"] == [attendant._thread]
    connected(path).close()
    while len(attendant.descriptors()) > MAX_AT_ONCE:
        time.sleep(0.001)
    with connected(path) as asking:
        asking.sendall(b"!")
        assert asking.recv(1) == b"!"
    attendant.stop()
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()


def test_slow_client_is_disconnected(place: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a connection open."""
    path, listener = place
    monkeypatch.setattr("kfcomm.monitor.serving.PATIENCE_S", 0.2)

    def read(sock: socket.socket) -> None:
        while sock.recv(1):
            pass

    attendant = Attendant(listener, read, "slow")
    with connected(path) as slow:
        is_open = True
        while is_open:
            try:
                slow.sendall(b"x")
            except OSError:
                is_open = False
    attendant.stop()


def test_an_answer_that_fails_ends_its_connection_alone(place: tuple[str, socket.socket]) -> None:
    path, listener = place
    asked = []

    def serve(sock: socket.socket) -> None:
        asked.append(sock.recv(1))
        if len(asked) == 1:
            raise OSError("broken")
        sock.sendall(b"!")

    attendant = Attendant(listener, serve, "broken")
    said = []
    for _ in range(2):
        with connected(path) as sock:
            sock.sendall(b"?")
            said.append(sock.recv(1))
    attendant.stop()
    assert said == [b"", b"!"]
