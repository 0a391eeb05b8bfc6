"""The statistics of running jobs, for their user on the same host: each rank answers, and can be found.

A rank with monitoring on listens at an abstract Unix socket (Linux alone has them), whose name holds the user, the job
and the rank; ``jobs`` reads the names from /proc/net/unix. A connection asks with one byte (see `Question`), and gets
one line of JSON and the end of the connection: the statistics of the rank's world, if it asks for nothing else. With
`RELAY` it asks for ranks of other hosts (see ``monitor.relaying``). The name is gone with the process, however that
ended.

Invariants: only processes of the same user are answered, and only theirs are believed (SO_PEERCRED, unix(7)).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfcomm.common import sockets, version
from kfcomm.common.sizes import shortened
from kfcomm.common.sockets import ask, credentials_of, own_names
from kfcomm.errors import ConfigError
from kfcomm.monitor.serving import PATIENCE_S, RELAY, Attendant

if TYPE_CHECKING:
    from kfcomm.monitor.statistics import Statistics

logger = logging.getLogger("kfcomm")

PREFIX = "kfcomm-live"
MAX_NBYTES = sockets.MAX_ANSWER_NBYTES
MAX_COMMAND = 60
_MAX_JOB_LETTERS = 32
_RANK_AND_PROCESS = re.compile(r"[0-9]+/[0-9]+\.[0-9]+")
_numbers = count()


class Question(Enum):
    """Requests that a rank answers."""

    STATISTICS = b"?"
    FIGURES = b"f"
    """Statistics without names, whose cost does not depend on how many names there are."""
    DUMP = b"d"
    """A record of ``monitor.dumps``."""
    GRAPHS = b"g"
    """Hosts of the ranks, and the graphs of the strategy in force."""
    USAGE = b"u"
    """Memory and descriptors of the rank's process: see ``monitor.usage``."""
    VERSIONS = b"v"
    """Version of kfcomm, and of its protocol."""


class Job(NamedTuple):
    """A job that runs on this host.

    Attributes:
        name: as its ranks have it: see ``job_name``.
        sockets: where its ranks on this host answer: rank and name of the socket, by rank.
    """

    name: str
    sockets: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks on this host."""
        return tuple(rank for rank, _ in self.sockets)

    @property
    def program(self) -> str:
        """Command and directory of its first process here; empty if the system does not provide them."""
        import shlex  # only for readers: ranks do not need it

        try:
            words = Path(f"/proc/{self.pids[0]}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            return f"{shortened(shlex.join(words), MAX_COMMAND)}, in {self.directory}"
        except (OSError, IndexError, ValueError):  # it has just ended, or is no socket of ``attend``
            return ""

    @property
    def age_s(self) -> float | None:
        """Seconds since its first process here began; None where the system does not say."""
        try:
            began_ticks = int(Path(f"/proc/{self.pids[0]}/stat").read_bytes().rpartition(b")")[2].split()[19])
            return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return None

    @property
    def directory(self) -> str:
        """The working directory of its first process here; empty where the system does not say."""
        try:
            return str(Path(f"/proc/{self.pids[0]}/cwd").readlink())
        except (OSError, IndexError, ValueError):
            return ""

    @property
    def pids(self) -> tuple[int, ...]:
        """Their processes."""
        return tuple(int(name.rpartition("/")[2].partition(".")[0]) for _, name in self.sockets)


def jobs(listing: str | None = None) -> tuple[Job, ...]:
    """The jobs of this user on this host that can be watched, by name.

    Args:
        listing: what /proc/net/unix says; it is read if left out.

    Returns:
        None of them where that file does not exist, as on other systems than Linux.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for name in own_names(PREFIX, listing):
        job, _, place = name.partition("/")
        if _RANK_AND_PROCESS.fullmatch(place):
            found.setdefault(job, []).append((int(place.partition("/")[0]), f"{PREFIX}/{os.getuid()}/{name}"))
    return tuple(Job(name, tuple(sorted(found[name]))) for name in sorted(found))


def read(job: Job, question: Question = Question.STATISTICS) -> list[Statistics]:
    """Statistics of the ranks of a job on this host, by rank, without those that have ended meanwhile.

    Takes as long as the slowest rank takes to answer, ``PATIENCE_S`` at most for each.
    """
    answers = [_statistics(name, question) for _, name in job.sockets]
    return [answer for answer in answers if answer is not None]


def answer_of(name: str, question: Question) -> Any:
    """Decoded answer at one of a job's sockets; None if it has ended, does not answer, or answers with something else.

    Takes ``PATIENCE_S`` at most.
    """
    try:
        answer = ask(name, question.value, PATIENCE_S)
        return None if not answer else json.loads(answer)
    except (OSError, ValueError) as error:
        logger.debug("no answer from %s: %s", name, error)
        return None


def difference(sockets: Iterable[str]) -> str | None:
    """Line on a job of another version of kfcomm, see ``version.difference``; None without an answer."""
    for name in sockets:
        answer = answer_of(name, Question.VERSIONS)
        if isinstance(answer, dict):
            return version.difference(answer.get("versions"))
    return None


def job_name(job: str | None, store: str | None) -> str:
    """The name of a job: what its launcher calls it, else its store, else (a world of one) its process."""
    name = job or store or f"pid {os.getpid()}"
    return re.sub(r"[^\w.]+", "-", name.removeprefix("http://"), flags=re.ASCII)[:_MAX_JOB_LETTERS]


def attend(
    job: str, rank: int, answer: Callable[[bytes], Any], pass_on: Callable[[socket.socket], None] | None = None
) -> Attendant | None:
    """Answer for a rank from now on; None where the system cannot do that: the rank works all the same.

    ``answer`` returns JSON-able values for the value of a `Question`; it raises ConfigError if it cannot. ``pass_on``
    serves the rest of a connection that began with `RELAY`.
    """
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The process and a number: one process may be rank 0 of several worlds.
        listener.bind(f"\0{PREFIX}/{os.getuid()}/{job}/{rank}/{os.getpid()}.{next(_numbers)}")
        listener.listen()
    except OSError as error:
        listener.close()
        logger.debug("rank %d cannot be watched: %s", rank, error)
        return None

    def serve(sock: socket.socket) -> None:
        if not credentials_of(sock).is_same_user:
            return
        question = sock.recv(1)
        if question == RELAY and pass_on is not None:
            pass_on(sock)
        elif question:
            with contextlib.suppress(ConfigError):  # the program has turned its meter off meanwhile
                sock.sendall(json.dumps(answer(question)).encode() + b"\n")

    return Attendant(listener, serve, "kfcomm-live")


def _statistics(name: str, question: Question) -> Statistics | None:
    from kfcomm.monitor.statistics import statistics_in  # here: this is done by those who watch, not by a rank

    return statistics_in(answer_of(name, question))
