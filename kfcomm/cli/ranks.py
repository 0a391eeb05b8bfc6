"""Ranks of a benchmark: those of the running job, or new ones.

New ranks are programs (``python -m kfcomm.bench``); rank 0 writes events to its standard output, and all other output
is relayed, with the rank before each line.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import click

import kfcomm
from kfcomm.bench.harness import available_nbytes
from kfcomm.bench.measure import run_rank
from kfcomm.bench.memory import num_devices
from kfcomm.bench.report import Files, Report, Watch
from kfcomm.bench.suite import Suite, from_line
from kfcomm.common.sizes import show_size
from kfcomm.errors import ConfigError
from kfcomm.launch.job import RunOptions
from kfcomm.launch.output import LauncherScreen, OutputStyle, Stream
from kfcomm.launch.run import run
from kfcomm.launch.streams import Display
from kfcomm.rendezvous.settings import Settings
from kfcomm.types import override

_MOST_RANKS = 8


def measure(suite: Suite, settings: Settings, num_ranks: int | None, files: Files, report: Report | None = None) -> int:
    """Run a benchmark and report it, by ``report`` if given; return the exit code.

    Raises:
        ConfigError: the suite does not fit the ranks, or a file cannot be written.
        KfcommError: the ranks cannot be started.
    """
    watch = Watch(report or Report(suite), files)
    num_gpus = num_devices() if suite.is_on_device else None
    if settings.size == 1:
        return _measure_new(suite, num_ranks or default_ranks(num_gpus), files, watch)
    if num_ranks is not None:
        raise ConfigError(
            f"-n {num_ranks} starts ranks, but this process is rank {settings.rank} of {settings.size} "
            f"already ({settings.source}): leave it out"
        )
    return _measure_here(suite, settings, files, watch)


def _measure_here(suite: Suite, settings: Settings, files: Files, watch: Watch) -> int:
    """Take part as one rank of the job; rank 0 reports."""
    suite.check(settings.size)
    if settings.rank == 0:
        files.check()
    exit_code = run_rank(suite, watch.note)
    return watch.finish(exit_code) if settings.rank == 0 else exit_code


def _measure_new(suite: Suite, num_ranks: int, files: Files, watch: Watch) -> int:
    """Start ranks on this host, and report the events of rank 0."""
    suite.check(num_ranks)
    files.check()
    _check_memory(suite, num_ranks)
    options = RunOptions(command=own_module("kfcomm.bench", suite.to_json()), num_ranks=num_ranks)
    try:
        exit_code = asyncio.run(run(options, os.environ, _Events(watch, num_ranks)))
    except KeyboardInterrupt:
        # before any rank was started: after that the launcher handles signals
        exit_code = 130
    return watch.finish(exit_code)


def own_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Command of every rank: this interpreter and this package, regardless of the working directory."""
    # -P keeps modules in the working directory from being imported in place of others. In a checkout, kfcomm itself may
    # be found only there.
    is_here = Path(kfcomm.__file__).parents[1] == Path.cwd()
    return (sys.executable, *(() if is_here else ("-P",)), "-m", module, *arguments)


def default_ranks(num_gpus: int | None = None) -> int:
    """Default number of ranks: one for each core, or for each device where arrays are on devices."""
    return min(max(num_gpus or len(os.sched_getaffinity(0)), 2), _MOST_RANKS)


def _check_memory(suite: Suite, num_ranks: int) -> None:
    """Check that the inputs and results of the largest case fit into memory, before ranks are killed for it."""
    # An input and a result on each rank.
    needed = 2 * num_ranks * max(case.nbytes for case in suite.cases(num_ranks))
    available = available_nbytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"{num_ranks} ranks need {show_size(needed)} for the largest case, and {show_size(available)} of memory "
            "are available: take fewer ranks or smaller messages"
        )


class Relay(Display):
    """Output of started ranks: that of rank 0 is the command's own, everything else goes to standard error."""

    def __init__(self, num_ranks: int) -> None:
        self._screen = LauncherScreen(OutputStyle(num_ranks))

    @override
    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        if (rank, stream) == (0, Stream.OUT):
            self.take(data)
        else:
            self.pass_on(rank, stream, data)

    @override
    async def say(self, text: str) -> None:
        self.show(f"kfcomm: {text}")

    def take(self, data: bytes) -> None:
        """Take in output of rank 0; empty at its end."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def show(self, text: str) -> None:
        """Write a line to standard error."""
        click.echo(text, err=True)

    def pass_on(self, rank: int, stream: Stream, data: bytes) -> None:
        """Show output with the rank before each line."""
        writes = self._screen.feed(rank, stream, data) if data else self._screen.end(rank, stream)
        for _, text in writes:
            self.show(text.decode(errors="replace").rstrip("\n"))


class _Events(Relay):
    """Events of rank 0 go to the watch, which shows everything else above its live line."""

    def __init__(self, watch: Watch, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._watch = watch
        self._rest = b""

    @override
    async def say(self, text: str) -> None:
        if not self._watch.has_failed:  # else the watch has shown why ranks fail
            await super().say(text)

    @override
    def take(self, data: bytes) -> None:
        # At the end of the output, an incomplete line counts as one.
        *lines, self._rest = (self._rest + (data or (self._rest and b"\n"))).split(b"\n")
        for line in lines:
            event = from_line(line.decode(errors="replace"))
            if event is not None:
                self._watch.note(event)
            else:
                self.pass_on(0, Stream.OUT, line + b"\n")

    @override
    def show(self, text: str) -> None:
        self._watch.say(text)
