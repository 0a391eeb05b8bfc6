"""`kfcomm run`: what a job needs is set up, the job watched, and everything taken down again.

The ranks of the first host are started before the store is: they take longer to come to it than it takes to serve, and
who comes early waits in the queue of its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import BinaryIO, Protocol

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.launch.hosts import Plan
from kfcomm.launch.options import RunOptions, rank_environ
from kfcomm.launch.output import Output, Pump
from kfcomm.launch.process import Child, Guardian, describe_exit, find_program
from kfcomm.launch.screen import Look, Screen, Stream
from kfcomm.launch.supervisor import Exits, Supervisor, Verdict
from kfcomm.monitor import serving
from kfcomm.plugins import check
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.interfaces import choose_address
from kfcomm.rendezvous.listening import listen, url_of
from kfcomm.rendezvous.settings import Settings, detect, store_url
from kfcomm.rendezvous.worlds import DEFAULT_PORT

_FAREWELL_S = 5.0
_LAUNCHERS = "launchers"


class Display(Protocol):
    """Where the output of the ranks goes."""

    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """What a rank has written; nothing at the end of the stream."""

    async def say(self, text: str) -> None:
        """A line of the launcher's own."""


async def run(options: RunOptions, environ: Mapping[str, str], display: Display | None = None) -> int:
    """Run a job to its end; returns the exit code. Output goes to ``display``, else to the terminal, with prefixes.

    Raises:
        ConfigError: the options cannot work.
        CommandError: the command cannot be run.
        RendezvousError: the store cannot listen, or that of the first host cannot be reached.
    """
    job = _Job(
        options=options,
        plan=options.plan(),
        program=find_program(options.command, environ.get("PATH")),
        token=options.token(environ),
        mark=secrets.token_hex(16),
        environ=environ,
    )
    settings = job.check()
    if job.plan.here == 0:
        with listen(job.plan.address, options.store_port()) as listener:
            return await _run_ranks(job, url_of(listener), _served(job, listener), display)
    async with _joined(job, settings) as client:
        return await _run_ranks(job, client.url, contextlib.nullcontext(client), display)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is the same for all ranks of the job on this host."""

    options: RunOptions
    plan: Plan
    program: str
    token: bytes
    mark: str
    environ: Mapping[str, str]

    def environ_of(self, rank: int, store: str) -> dict[str, str]:
        return rank_environ(self.environ, self.options, self.plan, rank, store=store, token=self.token, job=self.mark)

    def check(self) -> Settings:
        """Find here, once, what every rank would find wrong."""
        # which port it will be does not matter to the check
        store = self.plan.hosts[0].address, self.options.store_port() or DEFAULT_PORT
        settings = detect(self.environ_of(self.plan.ranks.start, store_url(*store)))
        choose_address(settings.interface, store)
        check(settings.strategy)
        serving.check(settings)
        return settings


@contextlib.asynccontextmanager
async def _served(job: _Job, listener: socket) -> AsyncIterator[Exits]:
    """The store, on the first host."""
    from kfcomm.rendezvous.store import StoreServer  # and the library of HTTP: the ranks have been started by now

    server = await StoreServer.serve(listener, token=job.token)
    try:
        yield server
        # the launchers of the other hosts still have to learn how it ended
        others, wait_s = len(job.plan.hosts) - 1, job.options.grace_s + _FAREWELL_S
        await server.board.collect(_LAUNCHERS, others, None, wait_s)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def _joined(job: _Job, settings: Settings) -> AsyncIterator[StoreClient]:
    """A client of the store, on the other hosts, once the store answers."""
    url = store_url(job.plan.hosts[0].address, job.options.store_port())
    client = StoreClient(url, job.token, timeout_s=settings.timeout_s)
    try:
        await client.find(_LAUNCHERS)
        yield client
        with contextlib.suppress(RendezvousError):
            await client.claim(f"{_LAUNCHERS}/{job.plan.here}", b"", timeout_s=_FAREWELL_S)
    finally:
        await client.close()


async def _run_ranks(job: _Job, url: str, store: AbstractAsyncContextManager[Exits], display: Display | None) -> int:
    """Start the ranks of this host, watch them to their end, and leave nothing of them behind.

    Args:
        job: what they are.
        url: of the store.
        store: entered once they have been started.
        display: see `run`.
    """
    children: dict[int, Child] = {}
    supervisor = Supervisor(job.plan.size, children, job.options.grace_s, job.options.keep_going)
    output = display or Output(_screen(job), _descriptors(), lambda: supervisor.interrupt(signal.SIGPIPE))
    with contextlib.ExitStack() as stack:
        logs = {rank: stack.enter_context(_log(job.options.log_dir, rank)) for rank in job.plan.ranks}
        stack.enter_context(_hearing(supervisor.interrupt))
        guardian = Guardian(job.mark, job.environ)
        try:
            for rank in job.plan.ranks:
                children[rank] = Child.start(job.program, job.options.command, job.environ_of(rank, url))
                stack.callback(children[rank].close)
                guardian.watch(children[rank])
            pumps = [
                Pump(descriptor, functools.partial(_relay, output, logs[rank], rank, stream))
                for rank, child in children.items()
                for stream, descriptor in ((Stream.OUT, child.out), (Stream.ERR, child.err))
            ]
            async with store as exits:
                async with asyncio.TaskGroup() as tasks:
                    for pump in pumps:
                        tasks.create_task(pump.run())
                    verdict = await supervisor.watch(exits)
                    await guardian.finish()
                    for pump in pumps:
                        pump.finish()
                if (summary := _summary(verdict, job, children)) is not None:
                    await output.say(summary)
        finally:
            await guardian.finish()
    return verdict.exit_code


async def _relay(output: Display, log: BinaryIO | None, rank: int, stream: Stream, data: bytes) -> None:
    if log is not None:
        log.write(data)
    await output.feed(rank, stream, data)


@contextlib.contextmanager
def _log(folder: Path | None, rank: int) -> Iterator[BinaryIO | None]:
    """The log file of a rank, unbuffered; None without a folder."""
    if folder is None:
        yield None
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"rank-{rank}.log").open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"--log-dir {str(folder)!r} cannot be written: {error.strerror}") from error
    with file:
        yield file


@contextlib.contextmanager
def _hearing(interrupt: Callable[[int], None]) -> Iterator[None]:
    """Have signals call ``interrupt``; hanging up is left ignored where it is (nohup)."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _descriptors() -> dict[Stream, int]:
    return {Stream.OUT: sys.stdout.fileno(), Stream.ERR: sys.stderr.fileno()}


def _screen(job: _Job) -> Screen:
    terminals = frozenset(stream for stream, descriptor in _descriptors().items() if os.isatty(descriptor))
    color = job.options.color
    if color is None:
        color = Stream.OUT in terminals and not job.environ.get("NO_COLOR")
    return Screen(Look(job.plan.size, color, terminals, shutil.get_terminal_size().columns))


def _summary(verdict: Verdict, job: _Job, children: Mapping[int, Child]) -> str | None:
    """A line on what went wrong first, or None."""
    if verdict.signal is not None:
        return f"ended by {signal.Signals(verdict.signal).name}"
    if verdict.lost:
        return f"the launcher on {job.plan.hosts[0].address} went away; the ranks of this host were ended"
    if verdict.failed is None:
        return None
    rank, code = verdict.failed
    where = f"pid {children[rank].pid}" if rank in children else "on another host"
    rest = "" if job.plan.size == 1 else "; the others ran on" if job.options.keep_going else "; the others were ended"
    return f"rank {rank} ({where}) failed first: {describe_exit(code)}{rest}"
