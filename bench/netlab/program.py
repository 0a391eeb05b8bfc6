"""A kfcomm program across the hosts of a bed: a launcher on each, its output, its end.

Every launcher starts the ranks of its host, as it would on a machine of its own. The files of this machine are those of
every host; only the network differs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from bench.netlab.hosts import Host
from bench.netlab.tools import NetlabError

GRACE_S = 15.0
"""How long the other launchers have, after one has failed, to end their ranks and themselves."""
_TOKENS = ("KFCOMM_TOKEN", "KFCOMM_TOKEN_FILE")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        exit_codes: of the launcher on each host, by its name; negative: minus the signal that killed it.
        output: what each host's ranks have written, with the rank before each line, by host; empty if not collected.
    """

    exit_codes: Mapping[str, int]
    output: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        """0 if all went well, else the first host's that failed, as a shell gives it."""
        code = next((code for code in self.exit_codes.values() if code), 0)
        return code if code >= 0 else 128 - code

    def check(self) -> None:
        """All must have gone well.

        Raises:
            NetlabError: some did not; with what they wrote.
        """
        if self.exit_code:
            codes = ", ".join(f"{name}: {code}" for name, code in self.exit_codes.items() if code)
            said = "".join(text for name, text in self.output.items() if self.exit_codes[name])
            raise NetlabError(f"the program failed (exit codes {codes})\n{said}".rstrip())


class Program:
    """A program under way. A context manager: whatever happens, nothing of it is left.

    Args:
        hosts: where; their order gives the ranks.
        command: what every rank runs; options of ``kfcomm run`` may stand before it.
        env: variables beside those of this process.
        collect: whether output is kept; else it goes where this process's goes.
    """

    def __init__(self, hosts: Sequence[Host], command: Sequence[str], env: Mapping[str, str], *, collect: bool) -> None:
        self._hosts = tuple(hosts)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, IO[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self._command = tuple(command)
        self._collect = collect
        self._env = {**os.environ, **env}
        if not any(name in self._env for name in _TOKENS):
            self._env["KFCOMM_TOKEN"] = secrets.token_hex(16)

    def __enter__(self) -> Self:
        try:
            for host in self._hosts:
                self._start(host)
        except BaseException:
            self._end(signal.SIGKILL)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(signal.SIGTERM)

    @property
    def is_over(self) -> bool:
        """Whether every launcher has ended."""
        return all(process.poll() is not None for process in self._processes.values())

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait for its end. Once one host has failed, the others have `GRACE_S`.

        Raises:
            NetlabError: it has not ended in time; leaving the context ends it.
        """
        if not self.wait_for(timeout_s):
            alive = ", ".join(name for name, process in self._processes.items() if process.poll() is None)
            raise NetlabError(f"the program has not ended within {timeout_s:g} s; it still runs on {alive}")
        return Outcome({name: process.returncode for name, process in self._processes.items()}, self._said())

    def wait_for(self, timeout_s: float | None) -> bool:
        """Wait for its end, but no longer than this; whether it has come."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        grace_until_s = None
        while alive := [process for process in self._processes.values() if process.poll() is None]:
            if grace_until_s is None and any(process.returncode for process in self._processes.values()):
                grace_until_s = time.monotonic() + GRACE_S
            if grace_until_s is not None and time.monotonic() >= grace_until_s:
                self._stop(signal.SIGTERM)
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return False
            until = [each for each in (deadline_s, grace_until_s) if each is not None]
            _wait_for_any(alive, max(0.0, min(until) - time.monotonic()) if until else None)
        return True

    def _start(self, host: Host) -> None:
        run = [sys.executable, "-m", "kfcomm", "run", "-H", self._listed(), "--self", host.address]
        output = None
        if self._collect:
            output = self._outputs[host.name] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the stack
            self._stack.callback(output.close)
        self._processes[host.name] = subprocess.Popen(
            host.inside(*run, *self._command),
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C is for whoever holds the bed, and is passed on from there
        )

    def _listed(self) -> str:
        return ",".join(f"{host.address}:{host.spec.ranks}" for host in self._hosts)

    def _said(self) -> dict[str, str]:
        said = {}
        for name, file in self._outputs.items():
            file.seek(0)
            said[name] = file.read().decode(errors="replace")
        return said

    def _end(self, number: signal.Signals) -> None:
        self._stop(number)
        self._stack.close()

    def _stop(self, number: signal.Signals) -> None:
        """Ask the launchers to end; kill those that do not. Each sees to it that none of its ranks outlives it."""
        for sign in (number, signal.SIGKILL):
            deadline_s = time.monotonic() + GRACE_S
            alive = [process for process in self._processes.values() if process.poll() is None]
            for process in alive:
                process.send_signal(sign)
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline_s - time.monotonic()))


def _wait_for_any(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None) -> None:
    """Returns when one of them has ended, or after the timeout."""
    with contextlib.ExitStack() as stack:
        descriptors = []
        for process in processes:
            descriptors.append(os.pidfd_open(process.pid))
            stack.callback(os.close, descriptors[-1])
        select.select(descriptors, [], [], timeout_s)
