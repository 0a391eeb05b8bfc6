"""`kfcomm run`: sets up a job, watches it, and tears everything down again.

On the first host, ranks are started before a store in memory: they take longer to connect than it takes to serve, and
early connections wait in the queue of its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import shutil
import signal
import textwrap
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfcomm.errors import ConfigError
from kfcomm.launch.exit_reports import Blame, ExitReports
from kfcomm.launch.hosts import names_resolved
from kfcomm.launch.job import LaunchJob, RunOptions, contradictions
from kfcomm.launch.launcher import FixedRole, JobOutcome, Launcher, LauncherPhase
from kfcomm.launch.local_ranks import LocalRanks, heard, ignored
from kfcomm.launch.other_hosts import HostRole, NotNeeded
from kfcomm.launch.output import LauncherScreen, Log, Output, OutputStyle, Stream
from kfcomm.launch.placing import bound
from kfcomm.launch.primary import PrimaryRole, Sizing
from kfcomm.launch.process import Child, Guardian, find_program
from kfcomm.launch.requests import LauncherRequests
from kfcomm.launch.stores import Store, joined, kept_store, served
from kfcomm.launch.streams import Display, Feed, OutputStreams, Pump
from kfcomm.rendezvous.host import listen, url_of
from kfcomm.rendezvous.keyvalue import Why, describe_exit
from kfcomm.rendezvous.settings import Settings, timeout_of

logger = logging.getLogger("kfcomm")

_DESCRIPTORS = {Stream.OUT: 1, Stream.ERR: 2}
_MAX_SUMMARY = 160
_MAX_DIGITS = 6
_KEPT_WITHIN_S = 2.0


async def run(options: RunOptions, environ: Mapping[str, str], display: Display | None = None) -> int:
    """Run a job to its end; returns the exit code. Output goes to ``display``, else to the terminal, with prefixes.

    Raises:
        ConfigError: the options cannot work.
        CommandError: the command cannot be run.
        RendezvousError: the store cannot listen, or that of the first host cannot be reached.
    """
    with ignored():
        return await _run(options, environ, display)


async def _run(options: RunOptions, environ: Mapping[str, str], display: Display | None) -> int:
    if options.hosts is not None:
        await names_resolved(options.hosts, timeout_of({**environ, **options.settings}))
    plan = options.plan()
    job = LaunchJob(
        options=options,
        plan=plan,
        elastic=options.elasticity(plan),
        program=find_program(options.command, environ.get("PATH")),
        token=options.token(environ),
        mark=options.mark(),
        environ=environ,
    )
    settings = job.check()
    if job.plan.here:
        try:
            async with joined(job, settings) as (job_here, store):
                return await _run_ranks(job_here, store, settings, display)
        except NotNeeded as over:
            logger.warning("%s", over)
            return 0
    for line in contradictions(environ, plan) if job.elastic is None else ():
        logger.warning("%s", line)
    job = (await job.discovered()).with_torch_port(settings)
    with listen(job.plan.address, options.store_port()) as listener:
        if job.elastic is None or options.store is None:
            store = Store(url_of(listener), functools.partial(served, job, listener, settings))
            return await _run_ranks(job, store, settings, display)
        async with kept_store(job, job.elastic, options.store, listener, settings) as store:
            return await _run_ranks(job, store, settings, display)


async def _run_ranks(job: LaunchJob, store: Store, settings: Settings, display: Display | None) -> int:
    """Start the ranks of this host, watch them to their end, and leave nothing of them behind."""
    launcher, screen = _launcher(job, store, settings.lost_after_s), _screen(job)
    output = Output(screen, lambda: launcher.interrupt(signal.SIGPIPE), _DESCRIPTORS)
    beginning = job.plan.ranks if store.ended is None else range(0)
    logs = {} if job.options.log_dir is None else _logs(job.options.log_dir, beginning)
    with contextlib.ExitStack() as stack:
        streams = stack.enter_context(contextlib.closing(OutputStreams(display or output, logs, launcher)))
        reports = ExitReports(
            job.plan.ranks, streams.heard, launcher.role.rank_released, is_elastic=job.elastic is not None
        )
        launcher.ranks.reports = stack.enter_context(contextlib.closing(reports))
        interrupted = stack.enter_context(_hearing(launcher, output.abandon))
        feed = stack.enter_context(contextlib.closing(Feed(job.options.readers(job.plan), screen.answered)))
        starter = _Starter(job, store.url, launcher.ranks, streams, feed, Guardian(job.mark, job.environ), logs, stack)
        try:
            for rank in beginning:
                starter.start(rank)
            async with contextlib.AsyncExitStack() as rooms, store.entered(interrupted) as exits:
                if isinstance(launcher.role, PrimaryRole):
                    answer = functools.partial(_answer, job, launcher.role)
                    await rooms.enter_async_context(LauncherRequests(job.mark, answer, job.options.command))
                observer = None
                if job.options.dashboard:
                    from kfcomm.launch.dashboard import served  # no other job needs it

                    observer = await rooms.enter_async_context(served(job.mark, streams.say))
                async with asyncio.TaskGroup() as tasks:
                    launcher.start = starter.start
                    launcher.say = lambda text: _spawn(tasks, streams.say(text))
                    starter.run_pumps(tasks)
                    feeding = tasks.create_task(feed.run())
                    with _limited(launcher, job.options.time_limit_s):
                        outcome = await launcher.watch(exits)
                    feeding.cancel()
                    await starter.guardian.finish()
                    # Now no process of the job writes any more, though an escaped one may hold a pipe open.
                    for pump in starter.pumps:
                        pump.finish()
                await streams.finish(outcome)
                if (summary := _summary(outcome, job, launcher.ranks.children, streams.common)) is not None:
                    await streams.say(summary)
                if observer is not None:
                    observer.end(summary or "all ranks have ended")
                await output.finish()
        finally:
            await starter.guardian.finish()
    return outcome.exit_code


@dataclass(slots=True)
class _Starter:
    """Starts ranks of this host, each with its place, its streams and its log."""

    job: LaunchJob
    store_url: str
    ranks: LocalRanks
    streams: OutputStreams
    feed: Feed
    guardian: Guardian
    logs: dict[int, Log]
    closing: contextlib.ExitStack
    pumps: list[Pump] = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)
    _tasks: asyncio.TaskGroup | None = None

    def start(self, rank: int) -> Child:
        """Start a rank.

        Raises:
            CommandError: the kernel refuses to run the file.
        """
        job = self.job
        if job.options.log_dir is not None:
            self.logs.setdefault(rank, _log(job.options.log_dir, rank))
        # The lowest free place, since a replacement takes over the device of the rank that it replaces.
        taken = {self._places[other] for other in self.ranks.living}
        self._places[rank] = next(place for place in itertools.count() if place not in taken)
        environ = job.environ_of(rank, self._places[rank], self.store_url, self.ranks.reports.address)
        with self.feed.open_for(rank) as stdin, bound(job.processors(self._places[rank])):
            child = self.ranks.children[rank] = Child.start(job.program, job.options.command, environ, stdin)
        # Reaped at the end of the job: until then its pid, which is that of its group, is not used again.
        self.closing.callback(child.close)
        # At once: if the launcher dies in the next moment, the guardian knows the group.
        self.guardian.watch(child)
        for stream, descriptor in ((Stream.OUT, child.out), (Stream.ERR, child.err)):
            self.pumps.append(Pump(descriptor, functools.partial(self.streams.relay, rank, stream)))
            if self._tasks is not None:
                self._tasks.create_task(self.pumps[-1].run())
        return child

    def run_pumps(self, tasks: asyncio.TaskGroup) -> None:
        """Relay the output of the ranks, also of those that are started later."""
        self._tasks = tasks
        for pump in self.pumps:
            tasks.create_task(pump.run())


def _launcher(job: LaunchJob, store: Store, lost_after_s: float) -> Launcher:
    host = store.position if len(job.plan.hosts) > 1 else None
    ranks = LocalRanks(job.options.grace_s)
    launcher = Launcher(ranks, Blame(job.plan.size), job.options.keep_going, host, store.first, dict(store.ended or {}))
    if job.elastic is None:
        launcher.role = FixedRole(launcher)
    elif store.first is not None:
        launcher.role = HostRole(launcher, store.first, lost_after_s, store.let_go)
    else:
        launcher.role = PrimaryRole(launcher, Sizing(launcher, job.elastic, job.discovery, job.arrivals), lost_after_s)
    return launcher


async def _answer(job: LaunchJob, role: PrimaryRole, line: str) -> dict[str, Any]:
    """Answer a request from outside.

    Raises:
        ConfigError: it is malformed or out of bounds.
    """
    what, _, number = line.partition(" ")
    elastic, launcher = role.elastic, role.launcher
    was, size, is_kept = elastic.size, elastic.size, True
    if what == "size" and number.isascii() and number.isdigit():
        size = int(number[:_MAX_DIGITS])
        if not elastic.least <= size <= elastic.most:
            raise ConfigError(f"size {number} is outside the job's range {elastic.least}..{elastic.most}")
        if launcher.phase is LauncherPhase.STOPPED:
            raise ConfigError(f"job {job.mark} has ended")
        asking = role.sizing.ask_size(size)
        # Bounded, since the store may be unreachable; the client hears whether the size is saved.
        await asyncio.wait([asking], timeout=_KEPT_WITHIN_S)
        is_kept = asking.done()
    elif what != "status":
        raise ConfigError(f"unknown request {line!r}; expected status, or size N")
    return {
        "job": job.mark, "size": size, "least": elastic.least, "most": elastic.most, "restarts": elastic.restarts,
        "running": sorted(elastic.running), "ended": sorted(launcher.ended.items()), "spares": elastic.spares,
        "was": was, "is_kept": is_kept,
        "hosts": elastic.by_host(), "slots": elastic.slots, "leaving": sorted(elastic.going),
    }  # fmt: skip


def _spawn(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    tasks.create_task(work)


def _logs(folder: Path, ranks: Iterable[int]) -> dict[int, Log]:
    """Open the log files of the initial ranks. Those of later ranks are opened at the first write.

    Raises:
        ConfigError: they cannot be written.
    """
    logs = {rank: _log(folder, rank) for rank in ranks}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for log in logs.values():
            log.open()
    except OSError as error:
        raise ConfigError(f"--log-dir {str(folder)!r} cannot be written: {error.strerror}") from error
    return logs


def _log(folder: Path, rank: int) -> Log:
    return Log(folder / f"rank-{rank}.log")


@contextlib.contextmanager
def _hearing(launcher: Launcher, abandon: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Have signals end or reach the ranks (see `local_ranks`); yields an event, set by the first that ends them."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def end(number: int) -> None:
        # Unread output is waited for as long as the ranks are.
        loop.call_later(0 if interrupted.is_set() else launcher.ranks.grace_s, abandon)
        interrupted.set()
        launcher.interrupt(number)

    with heard(end, launcher.passing.hear):
        yield interrupted


@contextlib.contextmanager
def _limited(launcher: Launcher, limit_s: float | None) -> Iterator[None]:
    """End the job after so many seconds; None: never."""
    if limit_s is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(limit_s, launcher.expire, limit_s)
    try:
        yield
    finally:
        timer.cancel()


def _screen(job: LaunchJob) -> LauncherScreen:
    terminals = frozenset(stream for stream, descriptor in _DESCRIPTORS.items() if os.isatty(descriptor))
    color = job.options.color
    if color is None:
        color = Stream.OUT in terminals and not job.environ.get("NO_COLOR")
    return LauncherScreen(OutputStyle(job.plan.size, color, terminals, shutil.get_terminal_size().columns))


def _summary(outcome: JobOutcome, job: LaunchJob, children: Mapping[int, Child], told: frozenset[str]) -> str | None:
    """A line on the first failure, without an error that was told for all ranks; or None."""
    if outcome.expired_s is not None:
        return f"the time limit of {outcome.expired_s:g} s is up: the ranks were ended"
    if outcome.signal is not None:
        return f"ended by {signal.Signals(outcome.signal).name}"
    if outcome.lost:
        return f"the launcher on {job.plan.hosts[0].address} went away; the ranks of this host were ended"
    if outcome.failed is None:
        return None
    failed = outcome.failed
    if failed.why in (Why.SILENT, Why.ABSENT) and failed.rank in children and job.elastic is not None:
        return f"the launcher on {job.plan.address} was unreachable for too long: the job continues without its ranks"
    if failed.why in (Why.SILENT, Why.ABSENT):
        return _missed(failed.why, job.plan.address if failed.rank in children else job.plan.address_of(failed.rank))
    where = f"pid {children[failed.rank].pid}" if failed.rank in children else "on another host"
    rest = "" if job.plan.size == 1 else "; the others ran on" if job.options.keep_going else "; the others were ended"
    why = (
        f" ({textwrap.shorten(failed.summary, _MAX_SUMMARY)})" if failed.summary and failed.summary not in told else ""
    )
    return f"rank {failed.rank} ({where}) failed first: {describe_exit(failed.code)}{why}{rest}"


def _missed(why: Why, address: str) -> str:
    what = "is not heard of any more" if why is Why.SILENT else "did not come"
    return f"the launcher on {address} {what}; the job was ended"
