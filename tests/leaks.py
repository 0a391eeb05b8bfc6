"""Leaks of a test: processes, threads, descriptors and temporary files.

A ``Snapshot`` is taken before a test and compared after it. Taking one costs well under a millisecond; only a test that
seems to leave something pays for a second, closer look.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

# A thread that has been told to end is joined, however slow the machine; the bound only turns a thread that never ends
# into a report instead of a hang.
PATIENCE_S = 60.0
# A thread that stays, such as a store's for all tests of a module, closes its connections in its own time.
CLOSING_S = 30.0
LOOK_S = 0.02

WATCHED = ("socket:", "pipe:", "/memfd:", "anon_inode:")

# Helper processes that the standard library starts once and keeps until the interpreter ends.
KEPT_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the process at one moment.

    Attributes:
        children: ids of this process's children, zombies included.
        threads: Python's threads.
        descriptors: how often each socket, pipe, memory file, event or poll descriptor is open.
        files: names in the folder for temporary files.
    """

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str] = field(compare=False)
    files: frozenset[str]

    @classmethod
    def take(cls, folder: Path) -> Snapshot:
        """The present state; ``folder`` is where temporary files go."""
        return cls(children(), threads(), descriptors(), frozenset(os.listdir(folder)))


def children() -> frozenset[int]:
    """Ids of this process's children, zombies included."""
    try:  # the usual case costs one system call: there are none
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    return frozenset(child.pid for child in psutil.Process().children() if not _is_kept(child))


def threads() -> frozenset[threading.Thread]:
    """Threads that Python started and that still run."""
    return frozenset(thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))


def descriptors() -> Counter[str]:
    """How often each watched descriptor is open, by what it refers to."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(WATCHED):
            found[target] += 1
    return found


def left_since(before: Snapshot, folder: Path) -> list[str]:
    """One line for each thing that is there now and was not ``before``, when what is ending has ended."""
    for thread in threads() - before.threads:
        if not thread.daemon:
            thread.join(PATIENCE_S)
    now = Snapshot.take(folder)
    if now.descriptors - before.descriptors or now.threads - before.threads:
        # Cycles may still hold what was closed, or hold open what was forgotten: then collecting them warns, which is
        # an error of its own.
        gc.collect()
        for thread in threads() - before.threads:
            thread.join(PATIENCE_S)
        until_s = time.monotonic() + CLOSING_S
        while (now := Snapshot.take(folder)).descriptors - before.descriptors and time.monotonic() < until_s:
            time.sleep(LOOK_S)
    return [*_differences(before, now)]


def _differences(before: Snapshot, now: Snapshot) -> Iterable[str]:
    for pid in sorted(now.children - before.children):
        yield f"process {_story(pid)}"
    for thread in now.threads - before.threads:
        yield f"thread {thread.name!r} (daemon: {thread.daemon})"
    for target, count in sorted((now.descriptors - before.descriptors).items()):
        yield f"descriptor {target} ({count} more than before)"
    for name in sorted(now.files - before.files):
        yield f"temporary file {name}"


def _is_kept(child: psutil.Process) -> bool:
    try:
        return any(name in word for word in child.cmdline() for name in KEPT_PROCESSES)
    except psutil.Error:
        return False


def _story(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}): {' '.join(process.cmdline()) or process.name()}"
    except psutil.Error:
        return f"{pid} (gone by now, but it was not waited for)"
