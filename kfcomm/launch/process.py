"""Process of a rank, with its own process group, watched through its descriptor.

A signal to the group reaches all child processes of the rank. An ended rank is left unreaped until the job is over:
until then its pid, also the id of its group, cannot be reused, so that a signal to the group cannot hit an unrelated
process. Watching needs no thread (pidfd_open(2), waitid(2) with WNOWAIT).

The ranks share the launcher's session: Linux divides the processor among sessions first (sched(7), "autogroup"). In a
session of its own, a rank that polls and yields would not yield to other ranks, and take half of the processor from the
rank that it waits for (measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfcomm.common.sockets import RESERVE, raise_limit_by, readable, why_failed
from kfcomm.errors import KfcommError
from kfcomm.launch import guardian

_PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
NOT_EXECUTABLE = 126
NOT_FOUND = 127


class CommandError(KfcommError):
    """The command cannot be run. ``exit_code`` is what a shell would return for it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def find_program(command: Sequence[str], path: str | None) -> str:
    """File that ``command`` would run.

    Raises:
        CommandError: it does not exist (127), or may not be executed (126), as in a shell.
    """
    name = command[0]
    found = shutil.which(name, path=path)
    if found is not None:
        return found
    hint = f"; did you mean 'python {name}'?" if name.endswith(".py") else ""
    if os.sep in name and Path(name).exists():
        raise CommandError(f"{name}: cannot be executed{hint}", NOT_EXECUTABLE)
    raise CommandError(f"{name}: command not found{hint}", NOT_FOUND)


def shell_code(code: int) -> int:
    """Return code as in a shell: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


@dataclass(frozen=True, slots=True)
class Child:
    """A started process, and the pipes that it writes to."""

    popen: subprocess.Popen[bytes]
    descriptor: int  # of the process
    out: int  # ends to read from
    err: int

    @classmethod
    def start(
        cls, program: str, command: Sequence[str], environ: Mapping[str, str], stdin: int = subprocess.DEVNULL
    ) -> Child:
        """Start ``command`` in its own process group, which cannot read from a terminal.

        Raises:
            CommandError: the kernel refuses to run the file.
        """
        # For the pipes below; the rank inherits the raised limit.
        raise_limit_by(RESERVE)
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            out, out_end, err, err_end = pipes
            # Ignored signals are inherited through exec, handlers are not.
            with _ignored(signal.SIGTTIN, signal.SIGTTOU):
                popen = subprocess.Popen(
                    command,
                    executable=program,
                    env=environ,
                    stdin=stdin,
                    stdout=out_end,
                    stderr=err_end,
                    process_group=0,
                    preexec_fn=_bound_to_this(),
                )
            descriptor = os.pidfd_open(popen.pid)
        except OSError as error:
            for one in pipes[::2]:
                os.close(one)
            raise CommandError(f"{command[0]}: {why_failed(error)}", NOT_EXECUTABLE) from error
        finally:
            for one in pipes[1::2]:
                os.close(one)
        return cls(popen, descriptor, out, err)

    @property
    def pid(self) -> int:
        """Id of the process and its group."""
        return self.popen.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                # after the command in parentheses
                return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False

    async def ended(self) -> int:
        """Wait for the end; the return code, negative for a signal."""
        await readable(self.descriptor)
        return self._return_code()

    def _return_code(self) -> int:
        # Left unreaped, so that its pid, which is that of its group, is not used again.
        found = os.waitid(os.P_PIDFD, self.descriptor, os.WEXITED | os.WNOWAIT)
        assert found is not None  # noqa: S101 - without WNOHANG there is an answer
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def send(self, number: int) -> None:
        """Send a signal to the process and all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def notify(self, number: int, pid: int | None = None) -> None:
        """Send a signal to the process alone, or to another one of its group, if that handles or ignores the signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # A Python program that is ending has no handlers left: the signal would turn its end into a failure.
            if pid is not None and os.getpgid(pid) == self.pid:
                if _lives_through(pid, number):
                    os.kill(pid, number)
            elif _lives_through(self.pid, number):
                signal.pidfd_send_signal(self.descriptor, number)

    def close(self) -> None:
        """Reap the process, which must have ended, and close its pipes."""
        self.popen.wait()
        for descriptor in (self.descriptor, self.out, self.err):
            os.close(descriptor)


def _lives_through(pid: int, number: int) -> bool:
    """Whether a process handles a signal, or ignores it; see proc_pid_status(5)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:  # it has ended
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith((b"SigIgn:", b"SigCgt:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


def _bound_to_this() -> Callable[[], None] | None:
    """Return a hook for a new process that has the kernel kill it when this one dies."""
    # For the case that the guardian is killed as well: this reaches the process itself, not its children, and a program
    # that changes its user loses it (prctl(2)). The kernel watches the thread that forks, and only the main thread
    # lives as long as the process.
    if threading.current_thread() is not threading.main_thread():
        return None
    # Looked up before the fork: after it, another thread's lock on the dynamic loader would never be released.
    prctl = ctypes.CDLL(None).prctl
    this = os.getpid()

    def bind() -> None:
        ignore()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != this:
            # the launcher died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return bind


def ignore() -> None:
    """Make a new process survive forwarded signals until its program sets a handler."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)


class Guardian:
    """The process that kills the ranks when this one is gone (see `guardian`)."""

    def __init__(self, mark: str, environ: Mapping[str, str]) -> None:
        # the mark of a launcher around this one must not get the guardian killed before its work is done
        cleaned = {name: value for name, value in environ.items() if name != "KFCOMM_JOB"}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, mark],
            env=cleaned,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal are not for it
        )

    def watch(self, child: Child) -> None:
        """Make the guardian responsible for a child."""
        assert self._popen.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(f"{child.pid}\n".encode())
            self._popen.stdin.flush()

    async def finish(self) -> None:
        """Have the guardian kill what is left of the job; return when it has ended."""
        if self._popen.returncode is not None:
            return
        assert self._popen.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        descriptor = os.pidfd_open(self._popen.pid)
        try:
            await readable(descriptor)
        finally:
            os.close(descriptor)
            self._popen.wait()


@contextlib.contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore these signals in processes started in the block: reading the terminal is an error there, not a stop."""
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
