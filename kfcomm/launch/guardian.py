"""Guardian: a process that outlives the launcher, to kill its orphans.

It is run by path, on its own (``python -I -S guardian.py MARK``), and imports nothing of the package. Its
standard input is a pipe whose other end the launcher alone holds; on it come the process groups of the ranks, one
a line. When the pipe ends, the launcher is gone, in whatever way, and the guardian kills every process that is
in one of these groups or that carries ``KFCOMM_JOB=MARK`` in its environment: the former finds programs that cleared
their environment, the latter those that made their own group, or were started while the launcher died.
PR_SET_PDEATHSIG reaches children only, not their children; it covers the case that the guardian is killed, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

_ROUNDS = 60
_ROUND_MS = 500
_LOOKS = 40
_LOOK_MS = 50
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h


def main() -> None:
    """Read the groups until the pipe ends, then kill all their processes."""
    # The guardian ends when its work is done, not by signals that are meant for the job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = {int(line) for line in sys.stdin}
    mark = b"KFCOMM_JOB=" + sys.argv[1].encode()
    # bounded, since a process in uninterruptible sleep does not die
    rounds, looks = _ROUNDS, _LOOKS
    while rounds and looks:
        if _kill_all(groups, mark):
            rounds -= 1
        elif any(_is_bare(pid) for pid in _pids()):
            # A process between fork and exec shows no environment, and may be the job's: look again.
            looks -= 1
            select.poll().poll(_LOOK_MS)
        else:
            return


def _kill_all(groups: set[int], mark: bytes) -> bool:
    """Kill processes of the job and wait for their end; return whether there were any."""
    descriptors = [descriptor for pid in _pids() for descriptor in _opened(pid, groups, mark)]
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    left = set(descriptors)
    while left and (ended := poll.poll(_ROUND_MS)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
            left.discard(descriptor)
    for descriptor in descriptors:
        os.close(descriptor)
    return bool(descriptors)


def _opened(pid: int, groups: set[int], mark: bytes) -> Iterator[int]:
    """A descriptor of the process, if it belongs to the job."""
    if not _belongs(pid, groups, mark):
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    # Checked again: from now on the descriptor holds the process, so that its pid cannot be reused.
    if _belongs(pid, groups, mark):
        yield descriptor
    else:
        os.close(descriptor)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _belongs(pid: int, groups: set[int], mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # after the command in parentheses: state, parent, group
            state, _, group = file.read().rpartition(b")")[2].split()[:3]
        if state in (b"Z", b"X"):
            return False
        if int(group) in groups:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def _is_bare(pid: int) -> bool:
    """Whether it shows no environment, as between fork and exec, or for a program started without one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *_, flags = file.read().rpartition(b")")[2].split()[:7]
        if state in (b"Z", b"X") or int(flags) & _KERNEL_THREAD:
            return False
        with open(f"/proc/{pid}/environ", "rb") as file:
            return not file.read(1)
    except OSError:
        return False


if __name__ == "__main__":
    main()
