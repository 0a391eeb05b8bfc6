"""Hosts for tests: network namespaces joined by a cable. They vanish with the processes that hold them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


class Host:
    """A network namespace with a loopback and, once connected, an interface ``port``.

    Attributes:
        pid: a process in it.
    """

    def __init__(self, holder: subprocess.Popen[bytes]) -> None:
        self.pid = holder.pid

    def inside(self, *line: str) -> list[str]:
        """The command that runs ``line`` on this host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *line]

    def ip(self, *arguments: str) -> None:
        """Run ip(8) on this host."""
        subprocess.run(self.inside("ip", *arguments), check=True)


@contextlib.contextmanager
def two_hosts(network: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts with the addresses ``network``.1 and ``network``.2, of 24 bits, joined by one cable."""
    with _host() as one, _host() as other:
        ends = ("port", "netns", str(one.pid)), ("port", "netns", str(other.pid))
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for number, host in enumerate((one, other), start=1):
            host.ip("address", "add", f"{network}.{number}/24", "dev", "port")
            host.ip("link", "set", "port", "up")
        yield one, other


@contextlib.contextmanager
def _host() -> Iterator[Host]:
    # cat answers from inside the new namespace, and ends with its standard input
    line = ["unshare", "--net", "sh", "-c", "ip link set lo up && exec cat"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"ready\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"ready\n"
        try:
            yield Host(holder)
        finally:
            holder.stdin.close()
            holder.wait()
