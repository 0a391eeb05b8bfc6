"""Key-value store of hydra, the launcher of MPICH and Intel MPI: PMI-1, lines of text over an inherited descriptor.

Rank 0 puts the token, all ranks pass a barrier, the others get it. Only processes that the launcher started have such a
descriptor. A program that uses MPI as well says ``init`` and ``finalize`` itself, each once, before or after this. One
that does not says ``finalize`` at its end: else hydra may take that for a crash, and end the job. So of several
programs in one task only the first has this channel.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import re
import select
import time
from pathlib import Path

from kfcomm.errors import KfcommError, RendezvousError
from kfcomm.rendezvous.authentication import HOW_TO_SET
from kfcomm.rendezvous.channels import Handing
from kfcomm.rendezvous.worlds import Environ, integer

TITLE = "PMI"
SOURCE = "hydra"
KEY = "kfcomm-token"
MAX_LINE_NBYTES = 4096
FINALIZED_WITHIN_S = 5.0


def why_absent(environ: Environ, source: str) -> str:
    """Return the reason why this process has no descriptor of hydra; empty if it has one."""
    if source != SOURCE:
        return "mpiexec of MPICH or Intel MPI has not started this process"
    return "" if "PMI_FD" in environ else "PMI_FD is not set"


async def agree(handing: Handing) -> tuple[bytes, bytes]:
    """Put the token (rank 0) or get it, behind a barrier of all ranks."""
    return await asyncio.to_thread(_agreed, handing), b""


def _agreed(handing: Handing) -> bytes:
    descriptor = integer(handing.environ, "PMI_FD", 0, 1 << 20)
    pmi = _Pmi(descriptor, time.monotonic() + handing.timeout_s)
    space = pmi.ask("get_my_kvsname", "kvsname")
    get = f"get kvsname={space} key={KEY}"
    # A key is put once, or hydra ends the job: this process may have joined before.
    if handing.rank == 0 and pmi.find(get, "value") is None:
        pmi.ask(f"put kvsname={space} key={KEY} value={handing.propose().decode()}")
    pmi.ask("barrier_in")
    _finalize_at_exit(descriptor, os.getpid())
    return pmi.ask(get, "value").encode()


@functools.cache
def _finalize_at_exit(descriptor: int, pid: int) -> None:
    """Say ``finalize`` at the end of this process, unless MPI does."""

    def finalize() -> None:
        if os.getpid() != pid or "/libmpi" in Path("/proc/self/maps").read_text(errors="replace"):
            return
        with contextlib.suppress(KfcommError, OSError):
            _Pmi(descriptor, time.monotonic() + FINALIZED_WITHIN_S).ask("finalize")

    atexit.register(finalize)


class _Pmi:
    """One side of the protocol."""

    def __init__(self, descriptor: int, deadline_s: float) -> None:
        self._descriptor = descriptor
        self._deadline_s = deadline_s

    def ask(self, command: str, field: str = "cmd") -> str:
        """Return a field of the answer to a command."""
        found = self.find(command, field)
        if found is None:
            raise RendezvousError(f"hydra refuses {command.split()[0]} of PMI at {self._descriptor}; {HOW_TO_SET}")
        return found

    def find(self, command: str, field: str) -> str | None:
        """Return a field of the answer to a command; None if that is a refusal."""
        self.send(command)
        answer = self.receive()
        found = re.search(rf"(?:^| ){field}=(\S+)", answer)
        code = re.search(r"(?:^| )rc=(\S+)", answer)
        return None if found is None or (code is not None and code[1] != "0") else found[1]

    def send(self, command: str) -> None:
        """Send one command."""
        try:
            os.write(self._descriptor, f"cmd={command}\n".encode())
        except OSError as error:
            raise RendezvousError(
                f"hydra does not listen at PMI_FD={self._descriptor}, as after an earlier program of this task "
                f"({error.strerror}); {HOW_TO_SET}"
            ) from error

    def receive(self) -> str:
        """Receive one line."""
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE_NBYTES:
            left_s = max(0.0, self._deadline_s - time.monotonic())
            if not select.select([self._descriptor], [], [], left_s)[0]:
                raise RendezvousError("not all ranks have come to the barrier of PMI within the timeout")
            # By single bytes: what follows the line is for MPI.
            if not (byte := os.read(self._descriptor, 1)):
                raise RendezvousError("hydra has closed the connection of PMI")
            line += byte
        return line.decode(errors="replace").strip()
