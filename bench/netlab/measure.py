"""Times of collectives across a bed, step by step, with the network changed in between where that is wanted."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.netlab.lab import Netlab
from bench.netlab.program import Program
from bench.netlab.steps import Step
from bench.netlab.tools import NetlabError

PATIENCE_S = 600.0
"""Longest wait for the first step, for any step, and for the end."""
_LOOK_S = 0.5

LOCK = Path("/var/run/kfnetlab.lock")

Hook = Callable[[int, Step], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """One step, on all ranks.

    Attributes:
        step: which.
        span_s: from the first rank's call to the last rank's result.
        rank_s: seconds of each rank, from its call to its result.
        cpu_s: processor time of all ranks together.
    """

    step: Step
    span_s: float
    rank_s: tuple[float, ...]
    cpu_s: float


def measure(
    lab: Netlab, steps: Sequence[Step], *, before_step: Hook | None = None, env: Mapping[str, str] | None = None
) -> list[Timing]:
    """Run the worker across the bed and time every step.

    Args:
        lab: a bed that stands.
        steps: in order.
        before_step: called before each step with its number, while all ranks wait: it may change links.
        env: variables of the ranks beside those of this process.

    Raises:
        NetlabError: a rank failed, or nothing was heard for `PATIENCE_S`; with what the ranks wrote.
    """
    records = conduct(lab, "bench.netlab.worker", steps, before_step=before_step, env=env)
    return [_timing(step, [record["times"][at] for record in records]) for at, step in enumerate(steps)]


def conduct(
    lab: Netlab,
    worker: str,
    steps: Sequence[Step],
    *,
    before_step: Hook | None = None,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run a program that does steps, as ``bench.netlab.worker`` does: what its ranks have written, by rank.

    Args:
        lab: a bed that stands.
        worker: the program, as a module.
        steps: see `measure`, also for what is raised.
        before_step: see `measure`.
        env: see `measure`.
    """
    with tempfile.TemporaryDirectory(prefix="netlab") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "conductor"
        listener.bind(str(path))
        listener.listen(1)
        command = [sys.executable, "-m", worker, "--conductor", str(path), "--output", folder]
        with lab.start([*command, *map(str, steps)], env=env) as program:
            _conduct(listener, program, steps, before_step)
            program.wait(PATIENCE_S).check()
        return _written(lab, Path(folder))


def records_of(
    lab: Netlab, module: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a program to its end without a conductor; returns what its ranks have written, by rank.

    Args:
        lab: a bed that stands.
        module: the program; it gets ``--output`` and a folder, where each rank writes ``rank-R.json``.
        arguments: before that.
        env: see `measure`, also for what is raised.
    """
    with tempfile.TemporaryDirectory(prefix="netlab") as folder:
        lab.run([sys.executable, "-m", module, *arguments, "--output", folder], env=env, timeout_s=PATIENCE_S).check()
        return _written(lab, Path(folder))


def _written(lab: Netlab, folder: Path) -> list[dict[str, Any]]:
    size = sum(host.spec.ranks for host in lab.hosts)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


@contextlib.contextmanager
def alone(waiting: Callable[[], None]) -> Iterator[None]:
    """Let no other measurement run here meanwhile; ``waiting`` is called if one does, which has to end first."""
    with LOCK.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _conduct(listener: socket.socket, program: Program, steps: Sequence[Step], before_step: Hook | None) -> None:
    """Let one step after the other begin; returns when rank 0 has closed its connection, or the program has ended."""
    connection = _met(listener, program)
    if connection is None:
        return
    with connection, connection.makefile("rb") as lines:
        connection.settimeout(PATIENCE_S)
        try:
            for line in lines:
                if before_step is not None:
                    before_step(int(line), steps[int(line)])
                connection.sendall(b"\n")
        except TimeoutError:
            raise NetlabError(f"no step has ended within {PATIENCE_S:g} s") from None
        except ConnectionError:
            return  # the rank has died: how, the end of the program says


def _met(listener: socket.socket, program: Program) -> socket.socket | None:
    listener.settimeout(_LOOK_S)
    while not program.is_over:
        try:
            return listener.accept()[0]
        except TimeoutError:
            continue
    return None


def _timing(step: Step, times: Sequence[Mapping[str, float]]) -> Timing:
    return Timing(
        step,
        span_s=max(each["end_s"] for each in times) - min(each["start_s"] for each in times),
        rank_s=tuple(each["end_s"] - each["start_s"] for each in times),
        cpu_s=sum(each["cpu_s"] for each in times),
    )
