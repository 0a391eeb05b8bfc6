"""The test's side of a job: it starts the actors, tells them what to do, and takes everything down again.

Every wait here is for a line of an actor or for the end of a process. Whatever happens, no process outlives its
`World`: each that ever connected is killed through its descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from kfcomm.errors import KfcommError
from kfcomm.rendezvous.store import StoreServer
from tests.launch.launched import TOKEN, command, environ
from tests.processes import roles

HANG_S = 60
"""Default timeout of collectives: it only turns a hang into an error that says who is missing."""
ACTOR = (sys.executable, "-W", "error", "-m", "tests.processes.actor")

Role = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a role ended with: the names of its class and that one's bases, its text, its attributes."""

    kinds: tuple[str, ...]
    message: str
    fields: Mapping[str, Any]


class Failed(AssertionError):
    """A role ended with an error that the test did not ask for."""


class Gone(AssertionError):
    """An actor ended while the test waited for a line of it."""


class Call:
    """A role under way on one actor."""

    def __init__(self, actor: Actor, number: int) -> None:
        self.actor = actor
        self._number = number

    def result(self) -> Any:
        """Wait for the result of the role."""
        answer = self.actor.answer(self._number)
        if "error" in answer:
            raise Failed(f"on {self.actor.label}: {answer['error']['kinds'][0]}: {answer['error']['message']}")
        return answer["ok"]

    def failure(self, kind: type[BaseException] = KfcommError) -> Failure:
        """The error that the role ended with, which must be of this kind."""
        error = self.actor.answer(self._number).get("error")
        assert error is not None, f"it succeeded on {self.actor.label}"
        failure = Failure(tuple(error["kinds"]), error["message"], error["fields"])
        assert kind.__name__ in failure.kinds, failure
        return failure


class Actor:
    """A process of the job, and the connection to it.

    Attributes:
        label: its rank, or the name that it gave itself.
        pid: its process id.
        ended: readable when it has ended (pidfd_open(2)).
    """

    def __init__(self, label: str, pid: int, connection: socket.socket) -> None:
        self.label = label
        self.pid = pid
        self.ended = os.pidfd_open(pid)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._answers: dict[int, dict[str, Any]] = {}
        self._logs: list[str] = []
        self._number = 0

    def do(self, role: Role, **args: Any) -> Call:
        """Have it begin a role."""
        self._number += 1
        self._send({"id": self._number, "do": f"{role.__module__}:{role.__qualname__}", "args": args})
        return Call(self, self._number)

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to one call."""
        while number not in self._answers:
            self._hear()
        return self._answers.pop(number)

    def log(self, *words: str) -> str:
        """The next line that it logs with all these words in it; those before it are passed over."""
        while True:
            while self._logs:
                line = self._logs.pop(0)
                if all(word in line for word in words):
                    return line
            self._hear()

    def logged(self) -> list[str]:
        """Return its log up to now: until a role that does nothing has ended."""
        self.do(roles.nothing).result()
        lines, self._logs = self._logs, []
        return lines

    def send(self, text: str) -> None:
        """A line for a connection that a role holds itself (see `actor.meet`)."""
        self._connection.sendall(text.encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Signal the process."""
        signal.pidfd_send_signal(self.ended, number)

    def wait(self) -> None:
        """Returns when the process has ended."""
        select.select([self.ended], [], [])

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return not select.select([self.ended], [], [], 0)[0]

    def end(self) -> None:
        """Tell it that there is nothing more to do."""
        self._send({"do": "end"})

    def close(self) -> None:
        """Kill it, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.wait()
        os.close(self.ended)
        self._lines.close()
        self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self) -> None:
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = b""
        if not line:
            raise Gone(f"{self.label} has ended")
        message = json.loads(line)
        if "log" in message:
            self._logs.append(message["log"])
        else:
            self._answers[message["id"]] = message


class Stage:
    """Listener to which processes of a job connect.

    Attributes:
        path: name of the socket: a file, which processes in other network namespaces find too.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stage")
        self.path = str(Path(self._folder.name) / "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._met: dict[str, Actor] = {}
        self._all: list[Actor] = []

    def meet(self, label: str, watched: Sequence[int] = ()) -> Actor:
        """The process that connects under this label; ``watched`` are descriptors of those that must not end."""
        while label not in self._met:
            ready, _, _ = select.select([self._listener, *watched], [], [])
            if self._listener not in ready:
                raise Gone(f"a process ended before {label!r} had connected")
            connection, _ = self._listener.accept()
            hello = json.loads(_line(connection))
            actor = self._met[hello["label"]] = Actor(hello["label"], hello["pid"], connection)
            self._all.append(actor)
            connection.sendall(b"!")
        return self._met.pop(label)

    def close(self) -> None:
        """End every process that has connected."""
        while self._all:
            self._all.pop().close()
        self._listener.close()
        self._folder.cleanup()


class World(Sequence[Actor]):
    """The actors of a job, by rank.

    Attributes:
        stage: where further processes connect.
        processes: what the test started: the ranks, or one launcher.
    """

    def __init__(self, stage: Stage, processes: Sequence[subprocess.Popen[bytes]], errors: Path) -> None:
        self.stage = stage
        self.processes = processes
        self._errors = errors
        self._actors: list[Actor] = []

    def __getitem__(self, rank: Any) -> Any:
        return self._actors[rank]

    def __len__(self) -> int:
        return len(self._actors)

    def gather(self, labels: Iterable[str]) -> None:
        """Wait until the processes with these labels have connected: these are the ranks."""
        watched = [os.pidfd_open(process.pid) for process in self.processes]
        try:
            self._actors = [self.stage.meet(label, watched) for label in labels]
        except Gone as error:
            raise Gone(f"{error}: {self.said()}") from None
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def start(self, role: Role, **args: Any) -> list[Call]:
        """Have every rank begin a role."""
        return start(self._actors, role, **args)

    def do(self, role: Role, **args: Any) -> list[Any]:
        """Have every rank do a role, all at once; what it returned, by rank."""
        return do(self._actors, role, **args)

    def said(self) -> str:
        """Return the output of the processes."""
        return self._errors.read_text()

    def finish(self) -> None:
        """Have every rank leave and end; no process may have failed, or said anything."""
        self.do(roles.leave)
        for actor in self._actors:
            actor.end()
        assert [process.wait() for process in self.processes] == [0] * len(self.processes), self.said()
        assert self.said() == ""


def start(actors: Iterable[Actor], role: Role, **args: Any) -> list[Call]:
    """Have these begin a role."""
    return [actor.do(role, **args) for actor in actors]


def do(actors: Iterable[Actor], role: Role, **args: Any) -> list[Any]:
    """Have these do a role, all at once; what it returned."""
    return [call.result() for call in start(actors, role, **args)]


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """A stage, closed at the end."""
    made = Stage()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def unjoined(size: int, **settings: str) -> Iterator[World]:
    """Processes started by hand, as ranks of one job, that have not joined it yet.

    Args:
        size: number of ranks.
        **settings: variables ``KFCOMM_*`` of all ranks, in small letters and without that prefix.
    """
    with contextlib.ExitStack() as stack:
        on = stack.enter_context(stage())
        url = stack.enter_context(served()).url
        errors = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="said"))) / "said"
        common = {"size": str(size), "store": url, "serve": "0", "token": TOKEN, **settings}
        processes = [
            stack.enter_context(_started([*ACTOR], errors, variables({**common, "rank": str(rank)}, on)))
            for rank in range(size)
        ]
        world = World(on, processes, errors)
        world.gather(map(str, range(size)))
        # the processes that have connected are killed before those above are waited for
        stack.callback(on.close)
        yield world


@contextlib.contextmanager
def joined(size: int, **settings: str) -> Iterator[World]:
    """The ranks of one job, which have joined it."""
    with unjoined(size, **settings) as world:
        world.do(roles.join)
        yield world


@contextlib.contextmanager
def launched(*arguments: str, size: int) -> Iterator[World]:
    """The ranks of a job under ``kfcomm run`` with these arguments, which have not joined it yet."""
    with on_hosts([command("run", *arguments)], size) as world:
        yield world


@contextlib.contextmanager
def on_hosts(commands: Sequence[Sequence[str]], num_actors: int, **settings: str) -> Iterator[World]:
    """Ranks under launchers of their hosts, or by hand: each command starts some, and ends with what starts an actor.

    Args:
        commands: one for each process to be started here.
        num_actors: number of ranks of all.
        **settings: as of `unjoined`.
    """
    with contextlib.ExitStack() as stack:
        on = stack.enter_context(stage())
        errors = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="said"))) / "said"
        env = variables({"token": TOKEN, **settings}, on)
        started = [stack.enter_context(_started([*line, *ACTOR], errors, env)) for line in commands]
        world = World(on, started, errors)
        world.gather(map(str, range(num_actors)))
        stack.callback(on.close)
        yield world


def variables(settings: Mapping[str, str], on: Stage, label: str = "") -> dict[str, str]:
    """The environment of an actor with these settings; ``label`` if it is not known by its rank."""
    named = {f"KFCOMM_{name.upper()}": value for name, value in settings.items()}
    return environ(**{"KFCOMM_TIMEOUT": str(HANG_S), **named, "STAGE": on.path, "LABEL": label})


@contextlib.contextmanager
def _started(line: Sequence[str], said: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with said.open("ab") as file:
        process = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def served() -> Iterator[StoreServer]:
    """A store on a thread of this process, where a launcher would have it."""
    ready: Queue[tuple[StoreServer, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def serve() -> None:
        server, done = await StoreServer.start("127.0.0.1", token=TOKEN.encode()), asyncio.Event()
        ready.put((server, asyncio.get_running_loop(), done))
        await done.wait()
        await server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="store")
    thread.start()
    server, loop, done = ready.get()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def _line(connection: socket.socket) -> bytes:
    """The first line that comes, and nothing beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        line += connection.recv(1)
    return line
