"""The dashboard's server: its messages, its errors, and whom it answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

import kfcomm
from kfcomm.cli import main
from kfcomm.common import sockets
from kfcomm.errors import ConfigError
from kfcomm.monitor.dashboard.frames import EventLog, clipped
from kfcomm.monitor.dashboard.serving import Address, is_loopback, served
from kfcomm.monitor.dashboard.watching import MAX_TRAINING, FrameFeed, JobObserver, Past
from kfcomm.monitor.live import Question, answer_of, jobs
from kfcomm.monitor.statistics import RecentEvent
from tests.launch.launched import Launcher, launched

PROGRAM = """
import os, time, kfcomm
from kfcomm.train import report
with kfcomm.sync.init() as comm:
    comm.all_reduce(1.0, name="loss")
    comm.set_strategy("ring")
    report(comm, {"loss": 0.5, "bad": float("nan")})
    held = open(os.environ["HELD"], "w")
    print(os.environ["KFCOMM_JOB"], comm.rank, os.getpid(), file=held, flush=True)
    while True:
        comm.all_reduce(1.0, name="<b>markup</b>")
        if comm.rank == 1 and os.path.exists(os.environ["HELD"] + ".hang"):
            time.sleep(1000)
"""


@contextlib.contextmanager
def job(folder: Path, *options: str, size: int = 2) -> Iterator[tuple[Launcher, str, list[int]]]:
    """A job that works until it is ended: its name, and its processes by rank."""
    with launched(folder, "-n", str(size), *options, sys.executable, "-c", PROGRAM) as launcher:
        said = sorted((line.split() for line in launcher.lines(size)), key=lambda words: int(words[1]))
        yield launcher, said[0][0], [int(words[2]) for words in said]


class Messages:
    """Reader of the server-sent events of a dashboard: the latest frame of each kind."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.latest: dict[str, Any] = {}
        self.kinds: list[str] = []

    async def until(self, kind: str, holds: Callable[[Any], object] = bool) -> Any:
        """Next frame of a kind for which a condition holds."""
        while True:
            found = await self._next()
            if found == kind and holds(self.latest[kind]):
                return self.latest[kind]

    async def _next(self) -> str:
        kind = ""
        while line := (await self._response.content.readuntil(b"\n")).decode():
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                self.latest[kind] = json.loads(value)
                self.kinds.append(kind)
            elif not field and kind:
                return kind
        raise EOFError(self.kinds)


@contextlib.asynccontextmanager
async def listening(url: str) -> AsyncIterator[Messages]:
    async with aiohttp.ClientSession(read_bufsize=1 << 24) as client, client.get(url + "events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        yield Messages(response)


@pytest.mark.asyncio
async def test_messages_have_figures_names_graphs_and_events(tmp_path: Path) -> None:
    with job(tmp_path) as (_, name, pids):
        observer = JobObserver(name)
        async with served(observer, Address(port=0)) as url, listening(url) as messages:
            assert url.startswith("http://127.0.0.1:")
            figures = await messages.until("figures", lambda frame: any(link[3] for link in frame["links"]))
            assert messages.kinds[0] == "past"
            assert (figures["job"], figures["size"], figures["strategy"]) == (name, 2, "ring")
            assert figures["gauges"] == {"loss": 0.5, "bad": None}
            assert [one["rank"] for one in figures["ranks"]] == [0, 1]
            assert [one["pid"] for one in figures["ranks"]] == pids
            assert all(one["rss"] > 1 << 20 and one["fds"] > 3 for one in figures["ranks"])
            names = await messages.until("names", lambda frame: not frame["is_first"])
            row = names["name"].index("<b>markup</b>")
            assert names["rate"][row] > 0
            assert names["calls"].keys() == {"0", "1"}
            assert messages.latest["graphs"]["rules"][0]["down"] == [[0, 1], [1, 0]]
            assert [one["what"] for one in messages.latest["events"]["events"] if one["kind"] == "strategy"] == ["ring"]
            assert messages.latest["waits"]["waits"] == []
            async with listening(url) as again:  # a browser that reconnects has the past
                past = await again.until("past")
                assert len(past["rates"]) > 1
                assert past["training"][0][2] == {"loss": 0.5, "bad": None}


@pytest.mark.asyncio
async def test_hanging_rank_is_named_with_its_line(tmp_path: Path) -> None:
    with job(tmp_path) as (_, name, _):
        async with served(JobObserver(name), Address(port=0)) as url, listening(url) as messages:
            await messages.until("names")
            (tmp_path / "held.hang").touch()
            waits = await messages.until("waits", lambda frame: frame["waits"])
            wait = waits["waits"][0]
            assert (wait["title"].partition("#")[0], wait["waiting"][0]["rank"]) == ("all_reduce '<b>markup</b>' ", 0)
            assert [one["rank"] for one in wait["missing"]] == [1]
            assert "<string>:13 in <module>" in wait["missing"][0]["at"][0]
            assert "rank 0 waits for rank 1" in waits["findings"][0]["text"]


@pytest.mark.asyncio
async def test_dead_rank_and_end_of_the_job_are_shown(tmp_path: Path) -> None:
    with job(tmp_path, "--keep-going") as (launcher, name, pids):
        observer = JobObserver(name)
        async with served(observer, Address(port=0)) as url, listening(url) as messages:
            await messages.until("figures")
            os.kill(pids[1], signal.SIGKILL)
            figures = await messages.until("figures", lambda frame: frame["gone"])
            assert 1 in figures["gone"]
            launcher.process.kill()
            if not figures["ended"]:
                await messages.until("figures", lambda frame: frame["ended"])
            await observer.has_ended.wait()
            async with listening(url) as late:  # the page can still be opened
                assert (await late.until("figures"))["ended"]


@pytest.mark.asyncio
async def test_page_is_read_only_and_has_no_foreign_parts() -> None:
    with kfcomm.sync.init():
        async with served(JobObserver(f"pid-{os.getpid()}"), Address(port=0)) as url, aiohttp.ClientSession() as client:
            async with client.get(url) as response:
                text = await response.text()
                assert "default-src 'self'" in response.headers["Content-Security-Policy"]
                assert "http" not in text
            async with client.get(url + "static/vendor/uPlot.esm.js") as response:
                assert response.status == 200
            async with client.post(url + "events") as response:
                assert response.status == 405
            async with client.get(url, headers={"Host": "evil.example"}) as response:
                assert response.status == 403


@pytest.mark.asyncio
async def test_other_addresses_are_behind_a_token() -> None:
    with kfcomm.sync.init():
        async with (
            served(JobObserver(f"pid-{os.getpid()}"), Address("0.0.0.0", 0)) as url,
            aiohttp.ClientSession() as client,
        ):
            port, token = url.rsplit(":", 1)[1].split("/")[:2]
            assert len(token) >= 20
            for path, status in ((f"/{token}/", 200), ("/", 404), ("/events", 404), ("/static/page.js", 404)):
                async with client.get(f"http://127.0.0.1:{port}{path}") as response:
                    assert response.status == status


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "example", "")))


def test_port_in_use_is_an_error_that_says_so() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match=r"127.0.0.1:\d+: Address already in use; choose another with --port, or 0"),
    ):
        Address(port=other.getsockname()[1]).listen()
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0"):
        Address("192.0.2.1", 0).listen()
    with Address().listen() as one, Address().listen() as another:
        assert one.getsockname() != another.getsockname()


def test_command_without_a_job_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKETS", "/proc/net/no-such-file")
    done = CliRunner().invoke(main, ["dashboard"])
    assert done.exit_code == 2
    assert "no job of yours runs on this host" in done.output


@pytest.mark.parametrize("arguments", [["--interval", "nan"], ["--interval", "0.1"], ["--port", "65536"]])
def test_options_out_of_range_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["dashboard", *arguments]).exit_code == 2


@pytest.mark.asyncio
async def test_slow_reader_misses_messages_and_gets_the_latest() -> None:
    feed = FrameFeed(lambda: {"rates": []})
    feed.publish("figures", {"n": 1})
    async with contextlib.aclosing(feed.read()) as messages:
        assert await anext(messages) == ("past", '{"rates":[]}')
        for n in (2, 3, 3):
            feed.publish("figures", {"n": n})
        feed.publish("names", {"n": 4})
        feed.close()
        assert [one async for one in messages] == [("figures", '{"n":3}'), ("names", '{"n":4}')]
    assert feed.num_readers == 0


def test_events_of_several_ranks_are_one_and_ordered() -> None:
    log = EventLog()
    lost = RecentEvent(100.0, "lost", "rank 3", "killed")
    assert log.add(0, "a", [lost])
    assert not log.add(0, "a", [lost])
    assert log.add(
        1, "b", [RecentEvent(101.0, "lost", "rank 3", "killed"), RecentEvent(90.0, "strategy", "x" * 999, "")]
    )
    assert [(one["kind"], one["ranks"]) for one in log.events] == [("strategy", [1]), ("lost", [0, 1])]
    assert len(log.events[0]["what"]) < 400
    assert clipped("short") == "short"
    log.note(RecentEvent(200.0, "lost", "rank 3", "killed"))  # another one
    assert len(log.events) == 3


def test_past_of_training_is_bounded() -> None:
    past = Past(0.2)
    for second in range(2 * MAX_TRAINING):
        past.add({"time": float(second), "size": 2, "gauges": {}, "ranks": [], "waited": {}})
    frame = past.frame()
    assert len(frame["rates"]) == 150
    assert MAX_TRAINING / 3 < len(frame["training"]) <= MAX_TRAINING


def test_rank_answers_every_question() -> None:
    with kfcomm.sync.init() as comm:
        comm.barrier("here")
        (mine,) = [one for one in jobs() if one.name == f"pid-{os.getpid()}"]
        ((_, name),) = mine.sockets
        assert [key["name"] for key in answer_of(name, Question.STATISTICS)["keys"]] == ["here"]
        assert answer_of(name, Question.FIGURES)["keys"] == []
        assert answer_of(name, Question.DUMP)["uses"]
        assert answer_of(name, Question.GRAPHS)["hosts"] == [0]
    assert answer_of(name, Question.DUMP) is None


def test_statistics_have_recent_events() -> None:
    with kfcomm.sync.init() as comm:
        comm.set_strategy("ring")
        (event,) = comm.statistics().events
        assert (event.kind, event.what, event.why) == ("strategy", "ring", "")
