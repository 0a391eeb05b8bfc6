"""`kfcomm run`: what a job needs is set up, the job watched, and everything taken down again.

The ranks of the first host are started before the store is: they take longer to come to it than it takes to serve, and
who comes early waits in the queue of its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import secrets
import shutil
import signal
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from socket import socket
from typing import Any

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.launch.agents import Agent, First, Mortal
from kfcomm.launch.blame import Blame
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.farewells import Farewells
from kfcomm.launch.feeding import Feed
from kfcomm.launch.hosts import Plan
from kfcomm.launch.hosts_heard import company, watch_hosts
from kfcomm.launch.options import LAUNCHER, RunOptions, rank_environ
from kfcomm.launch.output import Log, Output, Pump
from kfcomm.launch.process import Child, Guardian, find_program
from kfcomm.launch.requests import Requests
from kfcomm.launch.screen import Look, Screen, Stream
from kfcomm.launch.streams import Display, Streams
from kfcomm.launch.supervisor import Exits, Supervisor, Verdict
from kfcomm.monitor import serving
from kfcomm.plugins import check
from kfcomm.rendezvous.board import BOUNDS, LAUNCHERS, Why, describe_exit
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.interfaces import choose_address
from kfcomm.rendezvous.listening import listen, url_of
from kfcomm.rendezvous.settings import Settings, detect, store_url
from kfcomm.rendezvous.worlds import DEFAULT_PORT
from kfcomm.tls import Tls, load

_DESCRIPTORS = {Stream.OUT: 1, Stream.ERR: 2}
_FAREWELL_S = 5.0
_LEAST_LOST_AFTER_S = 3.0
"""Launchers ask the store once a second."""
_MAX_SUMMARY = 160


async def run(options: RunOptions, environ: Mapping[str, str], display: Display | None = None) -> int:
    """Run a job to its end; returns the exit code. Output goes to ``display``, else to the terminal, with prefixes.

    Raises:
        ConfigError: the options cannot work.
        CommandError: the command cannot be run.
        RendezvousError: the store cannot listen, or that of the first host cannot be reached.
    """
    plan = options.plan()
    job = _Job(
        options=options,
        plan=plan,
        elastic=options.elasticity(plan),
        program=find_program(options.command, environ.get("PATH")),
        token=options.token(environ),
        mark=secrets.token_hex(16),
        environ=environ,
    )
    settings = job.check()
    if job.plan.here == 0:
        with listen(job.plan.address, options.store_port()) as listener:
            return await _run_ranks(job, url_of(listener), functools.partial(_served, job, listener, settings), display)
    async with _joined(job, settings) as client:
        return await _run_ranks(job, client.url, lambda _: contextlib.nullcontext(client), display)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is the same for all ranks of the job on this host."""

    options: RunOptions
    plan: Plan
    elastic: Elasticity | None
    program: str
    token: bytes
    mark: str
    environ: Mapping[str, str]

    def environ_of(self, rank: int, place: int, store: str, launcher: str = "") -> dict[str, str]:
        own = rank_environ(
            self.environ, self.options, self.plan, rank, place=place, store=store, token=self.token, job=self.mark
        )
        return {**own, LAUNCHER: launcher}

    def ranks_of(self, host: int) -> Iterable[int]:
        """Those that a host has, or had, as far as it is known here."""
        return self.plan.ranks_of(host) if self.elastic is None else self.elastic.births_at(host)

    def check(self) -> Settings:
        """Find here, once, what every rank would find wrong."""
        # which port it will be does not matter to the check
        store = self.plan.hosts[0].address, self.options.store_port() or DEFAULT_PORT
        settings = detect(self.environ_of(self.plan.ranks.start, 0, store_url(*store)))
        choose_address(settings.interface, store)
        check(settings.strategy)
        serving.check(settings)
        _tls(settings)
        return settings


@contextlib.asynccontextmanager
async def _served(job: _Job, listener: socket, settings: Settings, interrupted: asyncio.Event) -> AsyncIterator[Exits]:
    """The store, on the first host."""
    from kfcomm.rendezvous.store import StoreServer  # and the library of HTTP: the ranks have been started by now

    server = await StoreServer.serve(listener, token=job.token, tls=_tls(settings))
    if job.elastic is not None:
        server.board.set(BOUNDS, b"%d:%d" % (job.elastic.least, job.elastic.most))
    watching = asyncio.create_task(
        watch_hosts(
            job.plan,
            server.board,
            job.ranks_of,
            come_within_s=settings.timeout_s,
            lost_after_s=max(settings.lost_after_s, _LEAST_LOST_AFTER_S),
        )
    )
    try:
        yield server
        # the launchers of the other hosts still have to learn how it ended
        others, wait_s = len(company(job.plan, server.board, job.ranks_of)), job.options.grace_s + _FAREWELL_S
        learnt = asyncio.ensure_future(server.board.collect(LAUNCHERS, others, None, wait_s))
        hurried = asyncio.ensure_future(interrupted.wait())
        await asyncio.wait((learnt, hurried), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (learnt, hurried):
            waiting.cancel()
        await asyncio.gather(learnt, hurried, return_exceptions=True)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.close()


def _tls(settings: Settings) -> Tls | None:
    return None if settings.tls is None else load(settings.tls)


@contextlib.asynccontextmanager
async def _joined(job: _Job, settings: Settings) -> AsyncIterator[StoreClient]:
    """A client of the store, on the other hosts, once the store answers."""
    url = store_url(job.plan.hosts[0].address, job.options.store_port())
    client = StoreClient(url, job.token, timeout_s=settings.timeout_s, tls=_tls(settings))
    try:
        await client.arrive(job.plan.here)
        yield client
        with contextlib.suppress(RendezvousError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await client.claim(f"{LAUNCHERS}/{job.plan.here}", b"", timeout_s=_FAREWELL_S)
    finally:
        await client.close()


async def _run_ranks(
    job: _Job, url: str, store: Callable[[asyncio.Event], AbstractAsyncContextManager[Exits]], display: Display | None
) -> int:
    """Start the ranks of this host, watch them to their end, and leave nothing of them behind.

    Args:
        job: what they are.
        url: of the store.
        store: entered once they have been started; told of signals.
        display: see `run`.
    """
    children: dict[int, Child] = {}
    supervisor = _supervisor(job, children)
    output = Output(_screen(job), lambda: supervisor.interrupt(signal.SIGPIPE), _DESCRIPTORS)
    with contextlib.ExitStack() as stack:
        streams = stack.enter_context(contextlib.closing(Streams(display or output, _logs(job), supervisor)))
        farewells = stack.enter_context(
            contextlib.closing(Farewells(job.plan.ranks, streams.heard, is_elastic=job.elastic is not None))
        )
        supervisor.listen = streams.listen = farewells.drain
        interrupted = stack.enter_context(_hearing(supervisor, output.abandon))
        feed = stack.enter_context(contextlib.closing(Feed(job.options.readers(job.plan), output.answered)))
        guardian = Guardian(job.mark, job.environ)
        pumps: list[Pump] = []
        places: dict[int, int] = {}

        def start(rank: int) -> Child:
            taken = {place for other, place in places.items() if other not in supervisor.ended}
            places[rank] = next(place for place in itertools.count() if place not in taken)
            environ = job.environ_of(rank, places[rank], url, farewells.address)
            with feed.open_for(rank) as stdin:
                child = children[rank] = Child.start(job.program, job.options.command, environ, stdin)
            stack.callback(child.close)
            guardian.watch(child)
            for stream, descriptor in ((Stream.OUT, child.out), (Stream.ERR, child.err)):
                pumps.append(Pump(descriptor, functools.partial(streams.relay, rank, stream)))
            return child

        try:
            for rank in job.plan.ranks:
                start(rank)
            async with contextlib.AsyncExitStack() as rooms, store(interrupted) as exits:
                async with asyncio.TaskGroup() as tasks:

                    def start_another(rank: int) -> Child:
                        child = start(rank)
                        for pump in pumps[-2:]:
                            tasks.create_task(pump.run())
                        return child

                    if isinstance(supervisor, First):
                        answer = functools.partial(_answer, job, supervisor, exits)
                        await rooms.enter_async_context(Requests(job.mark, answer))
                    if isinstance(supervisor, Mortal):
                        supervisor.start = start_another
                        supervisor.say = lambda text: _spawn(tasks, streams.say(text))
                    for pump in pumps:
                        tasks.create_task(pump.run())
                    feeding = tasks.create_task(feed.run())
                    verdict = await supervisor.watch(exits)
                    feeding.cancel()
                    await guardian.finish()
                    for pump in pumps:
                        pump.finish()
                await streams.finish(verdict)
                if (summary := _summary(verdict, job, children)) is not None:
                    await streams.say(summary)
                await output.finish()
        finally:
            await guardian.finish()
    return verdict.exit_code


def _supervisor(job: _Job, children: dict[int, Child]) -> Supervisor:
    host = job.plan.here if len(job.plan.hosts) > 1 else None
    watched = (Blame(job.plan.size), children, job.options.grace_s, job.options.keep_going, host)
    if job.elastic is None:
        return Supervisor(*watched)
    return Agent(*watched) if host else First(*watched, elastic=job.elastic)


async def _answer(job: _Job, supervisor: First, exits: Exits, line: str) -> dict[str, Any]:
    """What is told to who asks from outside.

    Raises:
        ConfigError: it cannot be.
    """
    what, _, number = line.partition(" ")
    elastic = supervisor.elastic
    size = elastic.size
    if what == "size" and number.isascii() and number.isdigit():
        size = int(number)
        if not elastic.least <= size <= elastic.most:
            raise ConfigError(f"this job has {elastic.least} to {elastic.most} ranks: {size} is not between")
        await exits.ask_size(size)
    elif what != "status":
        raise ConfigError(f"{line!r} is nothing that can be asked")
    return {
        "job": job.mark, "size": size, "least": elastic.least, "most": elastic.most, "restarts": elastic.restarts,
        "running": sorted(elastic.running), "ended": sorted(supervisor.ended.items()), "spares": elastic.spares,
        "hosts": [
            [host.address, sorted(elastic.running.intersection(elastic.births_at(at)))]
            for at, host in enumerate(job.plan.hosts)
        ],
    }  # fmt: skip


def _spawn(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    tasks.create_task(work)


def _logs(job: _Job) -> dict[int, Log]:
    """The log files of the ranks; none without a folder."""
    folder = job.options.log_dir
    if folder is None:
        return {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return {rank: Log(folder / f"rank-{rank}.log") for rank in job.plan.ranks}
    except OSError as error:
        raise ConfigError(f"--log-dir {str(folder)!r} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _hearing(supervisor: Supervisor, abandon: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Have signals end the ranks; hanging up is left ignored where it is (nohup).

    Output that nobody takes is waited for as long as the ranks are. Yields what tells of the first signal.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def hear(number: int) -> None:
        loop.call_later(0 if interrupted.is_set() else supervisor.grace_s, abandon)
        interrupted.set()
        supervisor.interrupt(number)

    for number in numbers:
        loop.add_signal_handler(number, hear, number)
    try:
        yield interrupted
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _screen(job: _Job) -> Screen:
    terminals = frozenset(stream for stream, descriptor in _DESCRIPTORS.items() if os.isatty(descriptor))
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
    failed = verdict.failed
    if failed.why in (Why.SILENT, Why.ABSENT):
        return _missed(failed.why, job.plan.address_of(failed.rank))
    where = f"pid {children[failed.rank].pid}" if failed.rank in children else "on another host"
    rest = "" if job.plan.size == 1 else "; the others ran on" if job.options.keep_going else "; the others were ended"
    why = f" ({textwrap.shorten(failed.summary, _MAX_SUMMARY)})" if failed.summary else ""
    return f"rank {failed.rank} ({where}) failed first: {describe_exit(failed.code)}{why}{rest}"


def _missed(why: Why, address: str) -> str:
    what = "is not heard of any more" if why is Why.SILENT else "did not come"
    return f"the launcher on {address} {what}; the job was ended"
