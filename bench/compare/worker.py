"""One process of a contender's world: it sleeps until it gets a turn, and reports how long that took.

    python -m bench.compare.worker CONTENDER

The socket to the one who gives the turns is named by ``COMPARE_SOCKET``. It carries one JSON object in each packet, in
both directions; its end means that the run has ended.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib import import_module
from typing import Any

from bench.compare.contenders.base import Contender, UnavailableError
from bench.compare.data import Data
from bench.compare.works import WORKS, Mode

CONTENDERS = {
    "kfcomm-async": ("kfcomm_async", "Async"),
    "kfcomm-blocking": ("kfcomm_blocking", "Blocking"),
    "kfcomm-symmetric": ("kfcomm_blocking", "Symmetric"),
    "gloo": ("gloo", "Gloo"),
    "deepspeed": ("deepspeed", "DeepSpeed"),
    "mpi": ("mpi", "Mpi"),
    "copy": ("floors", "Copy"),
    "sockets": ("floors", "Sockets"),
}
"""Module and class; a module is imported only where its library is."""
PACKET_NBYTES = 1 << 16


def main() -> None:
    """Joins the world, then takes turns until told to leave. Reports why, where the contender is unavailable."""
    module, name = CONTENDERS[sys.argv[1]]
    make = getattr(import_module(f"bench.compare.contenders.{module}"), name)
    contender: Contender | None = None
    try:
        contender = make()
        report: dict[str, Any] = {"versions": contender.versions()}
    except UnavailableError as error:
        report = {"unavailable": str(error)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(os.environ["COMPARE_SOCKET"])
        send(caller, report)
        if contender is not None:
            Worker(contender).serve(caller)


class Worker:
    """Takes the turns of one rank. The arrays of the last work are kept for the next turn."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._data: Data | None = None

    def serve(self, caller: socket.socket) -> None:
        """Take turns until asked to leave; end the process at once if the socket closes."""
        while True:
            parked_s, parked_cpu_s = time.perf_counter(), time.process_time()
            packet = caller.recv(PACKET_NBYTES)
            if not packet:
                os._exit(1)
            idle = {"parked_s": time.perf_counter() - parked_s, "parked_cpu_s": time.process_time() - parked_cpu_s}
            request = json.loads(packet)
            if request["work"] is None:
                self._contender.close()
                return
            send(caller, self._turn(request) | idle)

    def _turn(self, request: dict[str, Any]) -> dict[str, Any]:
        work = WORKS[request["work"]]
        if self._data is None or self._data.work is not work:
            self._data = None
            self._data = Data(work, self._contender.rank, self._contender.size, self._contender.room)
        watch = self._contender.turn(Mode(request["mode"]), self._data, request["calls"])
        return {"start_s": watch.start_s, "end_s": watch.end_s, "cpu_s": watch.cpu_s}


def send(caller: socket.socket, message: dict[str, Any]) -> None:
    """One packet."""
    caller.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
