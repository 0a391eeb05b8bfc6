"""An etcd of several members for a test: processes on this host, with folders of their own, ended with the test."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support import free_port

REQUIRE = "KFCOMM_REQUIRE_ETCD"
STARTED_WITHIN_S = 60.0
ELECTION = ("--heartbeat-interval", "100", "--election-timeout", "1000")


def program() -> str:
    """Path of etcd; without it the test is skipped, or fails if etcd is required."""
    found = shutil.which("etcd")
    if found is None:
        reason = "needs etcd 3.4 or later (Debian's etcd-server)"
        if os.environ.get(REQUIRE, "0") not in ("", "0"):
            pytest.fail(f"{reason}, and {REQUIRE} is set")
        pytest.skip(reason)
    return found


class Etcd:
    """An etcd.

    Args:
        folder: for what its members write.
        num_members: of them.
        options: of each.
        tls: of those that ask: files for certificate, key and authority.
    """

    def __init__(
        self, folder: Path, num_members: int = 1, options: Sequence[str] = (), tls: Sequence[Path] = ()
    ) -> None:
        self._program = program()
        self._folder = folder
        self._options = [*ELECTION, *options]
        self._scheme = "https" if tls else "http"
        if tls:
            certificate, key, authority = map(str, tls)
            self._options += [
                "--cert-file", certificate, "--key-file", key, "--trusted-ca-file", authority, "--client-cert-auth",
            ]  # fmt: skip
        self.ports = [free_port() for _ in range(num_members)]
        self._peers = [free_port() for _ in range(num_members)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * num_members
        for member in range(num_members):
            self.start(member)
        if not tls:
            self.until_there()

    def store(self, prefix: str = "job", who: str = "") -> str:
        """As ``--store`` has it."""
        scheme = "etcd" if self._scheme == "http" else "etcds"
        return f"{scheme}://{who}{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{prefix}"

    def start(self, member: int) -> None:
        """Start one, anew or again."""
        url, peer = (f"{self._scheme}://127.0.0.1:{self.ports[member]}", f"http://127.0.0.1:{self._peers[member]}")
        members = ",".join(f"m{at}=http://127.0.0.1:{port}" for at, port in enumerate(self._peers))
        with (self._folder / f"m{member}.log").open("ab") as log:
            self.processes[member] = subprocess.Popen(
                [
                    self._program, "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}"),
                    "--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", members, "--unsafe-no-fsync",
                    *self._options,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, member: int) -> None:
        """As by a crash."""
        process = self.processes[member]
        assert process is not None
        process.kill()
        process.wait()
        self.processes[member] = None

    def leader(self) -> int:
        """The member that leads."""
        while True:
            for member in self._living():
                told = self._ask(member, "/v3/maintenance/status", {})
                if told is not None and told.get("leader") == told["header"]["member_id"]:
                    return member

    def until_there(self) -> None:
        """Wait until it answers what needs a quorum."""
        deadline_s = time.monotonic() + STARTED_WITHIN_S
        while not any(self._ask(member, "/v3/kv/range", {"key": "YQ=="}) for member in self._living()):
            assert time.monotonic() < deadline_s, self._said()

    def ask(
        self, path: str, fields: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """The answer of a member that has one."""
        while True:
            for member in self._living():
                if (found := self._ask(member, path, fields, headers)) is not None:
                    return found

    def held(self) -> list[str]:
        """Its contents."""
        told = self.ask("/v3/kv/range", {"key": "AA==", "range_end": "AA==", "keys_only": True})
        return sorted(base64.b64decode(row["key"]).decode() for row in told.get("kvs", []))

    def close(self) -> None:
        """Nothing is left of it."""
        for process in filter(None, self.processes):
            process.kill()
            process.wait()

    def _living(self) -> list[int]:
        return [member for member, process in enumerate(self.processes) if process is not None]

    def _ask(
        self, member: int, path: str, fields: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any] | None:
        url = f"http://127.0.0.1:{self.ports[member]}{path}"
        request = urllib.request.Request(url, json.dumps(fields).encode(), dict(headers))
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                told: dict[str, Any] = json.loads(response.read())
                return told
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, ValueError):
            pass
        return None

    def _said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))


@contextlib.contextmanager
def running(
    folder: Path, num_members: int = 1, options: Sequence[str] = (), tls: Sequence[Path] = ()
) -> Iterator[Etcd]:
    """An etcd, for as long as the block."""
    program()
    folder.mkdir(exist_ok=True)
    made = Etcd(folder, num_members, options, tls)
    try:
        yield made
    finally:
        made.close()


def revoke_lease(etcd: Etcd, prefix: str) -> None:
    """End the lease that the keys of a job have."""
    told = etcd.ask("/v3/kv/range", {"key": base64.b64encode(f"{prefix}/lease".encode()).decode()})
    for row in told.get("kvs", []):
        etcd.ask("/v3/lease/revoke", {"ID": base64.b64decode(row["value"]).decode()})
