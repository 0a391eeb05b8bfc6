"""Network namespaces with a name that says whose they are, and the end of everything in them.

A bridge's is called ``kfnetlab-PID-START-BED``, and a host's ``kfnetlab-PID-START-BED-HOST``: the process that made it,
when that one was started (in clock ticks since boot, so that no other process is confused with it), which of its beds
it belongs to. So what a killed process has left can be told from what a living one uses.

ip(8) keeps a named namespace as a file that the kernel mounts it on; processes in it keep it, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.netlab.tools import NetlabError, check_tools, tool

PREFIX = "kfnetlab"
FOLDER = Path("/var/run/netns")
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)(?:-(.+))?")
_ROUNDS = 60
_ROUND_MS = 500


@dataclass(frozen=True, slots=True)
class Namespace:
    """A named network namespace, which may or may not exist."""

    name: str

    @property
    def path(self) -> Path:
        """The file that it is mounted on."""
        return FOLDER / self.name

    def add(self) -> None:
        """Make it, with a loopback that works."""
        tool("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")

    def inside(self, *line: str) -> list[str]:
        """The command that runs ``line`` in it."""
        return ["nsenter", f"--net={self.path}", *line]

    def ip(self, *arguments: str) -> str:
        """Run iproute2's ``ip`` in it; what it wrote."""
        return tool("ip", "-n", self.name, *arguments)

    def tc(self, *arguments: str) -> str:
        """Run iproute2's ``tc`` in it; what it wrote."""
        return tool("tc", "-n", self.name, *arguments)

    def tc_all(self, lines: Sequence[str]) -> None:
        """Run many lines of ``tc`` in it, up to the first that fails."""
        tool("tc", "-n", self.name, "-batch", "-", text="".join(f"{line}\n" for line in lines))

    def write(self, variable: str, value: str) -> None:
        """Set a variable of sysctl(8) in it; of those below ``net``, namespaces have their own."""
        where = f"/proc/sys/{variable.replace('.', '/')}"
        tool(*self.inside("sh", "-c", f"cat > {where}"), text=value)

    def delete(self) -> None:
        """End every process in it, then take it away. Doing so again does nothing."""
        self.kill()
        try:
            tool("ip", "netns", "delete", self.name)
        except NetlabError:
            if self.path.exists():
                raise

    def kill(self) -> None:
        """End every process in it, and wait for their ends."""
        try:
            own = os.stat(self.path)
        except FileNotFoundError:
            return
        for _ in range(_ROUNDS):  # one that the kernel holds fast does not die; then nothing more can be done
            descriptors = [descriptor for pid in _pids() for descriptor in _opened(pid, own)]
            if not descriptors:
                return
            _kill_all(descriptors)
        raise NetlabError(f"{self.name}: processes in it do not end")


def owner() -> str:
    """How the names begin of the namespaces that this process makes."""
    return f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"


def existing() -> list[Namespace]:
    """All namespaces of beds, of any process, sorted."""
    try:
        names = sorted(os.listdir(FOLDER))
    except FileNotFoundError:
        return []
    return [Namespace(name) for name in names if _NAME.fullmatch(name)]


def clean() -> list[str]:
    """Take away what dead processes have left; returns the names. Those of living ones are not touched.

    Raises:
        NetlabUnavailable: ip(8) is not installed.
        NetlabError: something cannot be taken away; the rest has been.
    """
    left = [namespace for namespace in existing() if not _is_owned(namespace.name)]
    if left:
        check_tools()
    errors = []
    for namespace in left:
        try:
            namespace.delete()
        except NetlabError as error:
            errors.append(str(error))
    if errors:
        raise NetlabError("\n".join(errors))
    return [namespace.name for namespace in left]


def _is_owned(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and _started(int(match[1])) == int(match[2])


def _started(pid: int) -> int | None:
    """Start of the process in clock ticks since boot; None if it has ended."""
    try:
        # after the command in parentheses: state, parent, ...; the start is the 22nd field of all
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _opened(pid: int, namespace: os.stat_result) -> Iterator[int]:
    """A descriptor of the process, if it is in the namespace; looked at twice, for its number may become another's."""
    if not _is_in(pid, namespace):
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    if _is_in(pid, namespace):
        yield descriptor
    else:
        os.close(descriptor)


def _is_in(pid: int, namespace: os.stat_result) -> bool:
    try:
        found = os.stat(f"/proc/{pid}/ns/net")
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (namespace.st_dev, namespace.st_ino)


def _kill_all(descriptors: list[int]) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    left = len(descriptors)
    while left and (ended := poll.poll(_ROUND_MS)):
        for descriptor, _ in ended:
            poll.unregister(descriptor)
        left -= len(ended)
    for descriptor in descriptors:
        os.close(descriptor)
