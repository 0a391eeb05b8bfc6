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
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.launch.agents import Agent, First, Mortal
from kfcomm.launch.blame import Blame
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.farewells import Farewells
from kfcomm.launch.feeding import Feed
from kfcomm.launch.hosts import Plan
from kfcomm.launch.hosts_heard import Claims, arrive, company, watch_hosts, who_launches
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
from kfcomm.rendezvous.etcd.address import is_etcd, parse
from kfcomm.rendezvous.folders import AGAIN_S
from kfcomm.rendezvous.interfaces import choose_address
from kfcomm.rendezvous.listening import listen, url_of
from kfcomm.rendezvous.settings import Settings, detect, store_url
from kfcomm.rendezvous.worlds import DEFAULT_PORT
from kfcomm.tls import Tls, load

if TYPE_CHECKING:
    from kfcomm.rendezvous.backing import Lasting
    from kfcomm.rendezvous.store import StoreServer

_DESCRIPTORS = {Stream.OUT: 1, Stream.ERR: 2}
_FAREWELL_S = 5.0
_LEAST_LOST_AFTER_S = 3.0
"""Launchers ask the store once a second."""
_MAX_SUMMARY = 160
_MAX_DIGITS = 6
_KEPT_WITHIN_S = 2.0
_REACH_WITHIN_S = 15.0
"""For which an etcd is tried before the job begins."""
_AGAIN_WITHIN_S = 20.0
"""What a first launcher takes to be started again, beyond the time for which it waits for the others."""


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
    if job.plan.here:
        async with _joined(job, settings) as store:
            return await _run_ranks(job, store, display)
    with listen(job.plan.address, options.store_port()) as listener:
        if job.elastic is None or options.store is None:
            served = functools.partial(_served, job, listener, settings)
            return await _run_ranks(job, _Store(url_of(listener), served), display)
        async with _kept(job, job.elastic, options.store, listener, settings) as store:
            return await _run_ranks(job, store, display)


class _Store(NamedTuple):
    """A store, towards which ranks are started.

    Attributes:
        url: of it.
        entered: once they have been; told of signals.
        first: by which the first launcher is known to be there; None on its host.
        let_go: ends what waits in it.
        ended: if the job runs already, the return codes of those that have ended; else None.
    """

    url: str
    entered: Callable[[asyncio.Event], AbstractAsyncContextManager[Exits]]
    first: StoreClient | None = None
    let_go: Callable[[], None] = lambda: None
    ended: Mapping[int, int] | None = None


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
    """The store, on the first host, in the memory of this process."""
    from kfcomm.rendezvous.store import StoreServer  # and the library of HTTP: the ranks have been started by now

    server = await StoreServer.serve(listener, token=job.token, tls=_tls(settings))
    if job.elastic is not None:
        await _set_bounds(server, job.elastic)
    async with _watched(job, server, settings, interrupted):
        yield server


@contextlib.asynccontextmanager
async def _kept(
    job: _Job, elastic: Elasticity, store: str, listener: socket, settings: Settings
) -> AsyncIterator[_Store]:
    """The store, on the first host, kept where it outlives this process; ranks are started when it has been read.

    Raises:
        ConfigError: it cannot be, or is another job's.
        RendezvousError: it cannot be reached, or is another launcher's.
    """
    from kfcomm.launch import again
    from kfcomm.rendezvous.store import StoreServer

    backing = await _backing(job, store, settings, is_first=True)
    server, has_begun = None, False
    try:
        if (there := again.Record.found(backing.board)) is not None:
            backing.identity = there.identity
        server = await StoreServer.serve(listener, token=job.token, tls=_tls(settings), backing=backing)
        goes_on = await again.begin(server, store, job.plan, elastic, _lost_after_s(settings))
        has_begun = True
        await _set_bounds(server, elastic)
        ended = {end.rank: end.code for end in server.board.exits.values()} if goes_on else None
        yield _Store(server.url, functools.partial(_watched, job, server, settings, goes_on=goes_on), ended=ended)
    finally:
        if server is not None:
            await server.close()
        await backing.close(is_over=has_begun)


async def _set_bounds(server: StoreServer, elastic: Elasticity) -> None:
    await server.set(BOUNDS, b"%d:%d" % (elastic.least, elastic.most))


async def _backing(job: _Job, store: str, settings: Settings, *, is_first: bool) -> Lasting:
    if is_etcd(store):
        from kfcomm.rendezvous.etcd.mirror import Mirror  # and the library of HTTP

        within_s = min(settings.timeout_s, _REACH_WITHIN_S)
        return await Mirror.begin(parse(store, job.environ), is_first=is_first, within_s=within_s)
    from kfcomm.rendezvous.journal import Journal

    return Journal(Path(store))


@contextlib.asynccontextmanager
async def _watched(
    job: _Job, server: StoreServer, settings: Settings, interrupted: asyncio.Event, *, goes_on: bool = False
) -> AsyncIterator[Exits]:
    """The store of the first host, and by it the launchers of the others; closed in the end."""
    lost_after_s = _lost_after_s(settings)
    watching = asyncio.create_task(
        watch_hosts(
            job.plan, server.board, server, job.ranks_of, lost_after_s=lost_after_s,
            come_within_s=lost_after_s if goes_on else settings.timeout_s,
        )
    )  # fmt: skip
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


def _lost_after_s(settings: Settings) -> float:
    return max(settings.lost_after_s, _LEAST_LOST_AFTER_S)


def _tls(settings: Settings) -> Tls | None:
    return None if settings.tls is None else load(settings.tls)


@contextlib.asynccontextmanager
async def _joined(job: _Job, settings: Settings) -> AsyncIterator[_Store]:
    """The store, on the other hosts, once that of the first answers: that one, or, in etcd, a part of it here."""
    url = store_url(job.plan.hosts[0].address, job.options.store_port())
    client = StoreClient(url, job.token, timeout_s=settings.timeout_s, tls=_tls(settings))
    kept = job.options.store
    # who was ended with all others is started again with them, and waits until the first knows it
    within_s = 0.0 if kept is None else _lost_after_s(settings) + _AGAIN_WITHIN_S
    try:
        if kept is None or not is_etcd(kept):
            await arrive(client, client, job.plan.here, who_launches(), within_s)
            store = _Store(client.url, lambda _: contextlib.nullcontext(client), client)
            yield store
            await _say_farewell(job, client)
        else:
            async with _mirrored(job, kept, client, settings, within_s) as (store, server):
                yield store
                await _say_farewell(job, server)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _mirrored(
    job: _Job, kept: str, client: StoreClient, settings: Settings, within_s: float
) -> AsyncIterator[tuple[_Store, StoreServer]]:
    """The store of this host, kept in etcd as that of the first is; its ranks know no other."""
    from kfcomm.launch.again import Record
    from kfcomm.rendezvous.store import StoreServer

    backing = await _backing(job, kept, settings, is_first=False)
    server = await StoreServer.start(job.plan.address, token=job.token, tls=_tls(settings), backing=backing)
    try:
        me = who_launches()
        while True:
            await arrive(client, server, job.plan.here, me, within_s)
            there = Record.found(backing.board)
            if there is not None and there.identity == client.identity:
                break
            await asyncio.sleep(AGAIN_S)
        yield _Store(server.url, lambda _: contextlib.nullcontext(server), client, backing.board.close), server
    finally:
        await server.close()
        await backing.close(is_over=False)


async def _say_farewell(job: _Job, store: Claims) -> None:
    with contextlib.suppress(RendezvousError, TimeoutError):
        async with asyncio.timeout(_FAREWELL_S):
            await store.claim(f"{LAUNCHERS}/{job.plan.here}", b"")


async def _run_ranks(job: _Job, store: _Store, display: Display | None) -> int:
    """Start the ranks of this host, watch them to their end, and leave nothing of them behind.

    Args:
        job: what they are.
        store: of the job.
        display: see `run`.
    """
    children: dict[int, Child] = {}
    supervisor = _supervisor(job, children, store)
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
            environ = job.environ_of(rank, places[rank], store.url, farewells.address)
            with feed.open_for(rank) as stdin:
                child = children[rank] = Child.start(job.program, job.options.command, environ, stdin)
            stack.callback(child.close)
            guardian.watch(child)
            for stream, descriptor in ((Stream.OUT, child.out), (Stream.ERR, child.err)):
                pumps.append(Pump(descriptor, functools.partial(streams.relay, rank, stream)))
            return child

        try:
            for rank in job.plan.ranks if store.ended is None else ():
                start(rank)
            async with contextlib.AsyncExitStack() as rooms, store.entered(interrupted) as exits:
                async with asyncio.TaskGroup() as tasks:

                    def start_another(rank: int) -> Child:
                        child = start(rank)
                        for pump in pumps[-2:]:
                            tasks.create_task(pump.run())
                        return child

                    if isinstance(supervisor, First):
                        answer = functools.partial(_answer, job, supervisor)
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


def _supervisor(job: _Job, children: dict[int, Child], store: _Store) -> Supervisor:
    host = job.plan.here if len(job.plan.hosts) > 1 else None
    watched = (Blame(job.plan.size), children, job.options.grace_s, job.options.keep_going, host)
    if job.elastic is None:
        return Supervisor(*watched)
    if store.first is not None:
        return Agent(*watched, first=store.first, let_go=store.let_go)
    first = First(*watched, elastic=job.elastic)
    first.ended = dict(store.ended or {})
    return first


async def _answer(job: _Job, supervisor: First, line: str) -> dict[str, Any]:
    """What is told to who asks from outside.

    Raises:
        ConfigError: it cannot be.
    """
    what, _, number = line.partition(" ")
    elastic = supervisor.elastic
    size, is_kept = elastic.size, True
    if what == "size" and number.isascii() and number.isdigit():
        size = int(number[:_MAX_DIGITS])
        if not elastic.least <= size <= elastic.most:
            raise ConfigError(f"this job has {elastic.least} to {elastic.most} ranks: {number} is not between")
        asking = supervisor.ask_size(size)
        await asyncio.wait([asking], timeout=_KEPT_WITHIN_S)
        is_kept = asking.done()
    elif what != "status":
        raise ConfigError(f"{line!r} is nothing that can be asked")
    return {
        "job": job.mark, "size": size, "least": elastic.least, "most": elastic.most, "restarts": elastic.restarts,
        "running": sorted(elastic.running), "ended": sorted(supervisor.ended.items()), "spares": elastic.spares,
        "is_kept": is_kept,
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
