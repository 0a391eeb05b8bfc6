"""How long a byte takes from one host of a test bed to another: half the round trip, the median of many.

    python -m bench.latency

Two programs, one on each host, send each other a byte over a TCP connection, as a runtime does that waits for its
selector: so what the kernel needs to wake a program is in it, and what a message costs a runtime is not.
"""

from __future__ import annotations

import selectors
import socket
import statistics
import subprocess
import sys
import time

from bench.netlab import Netlab, even

ROUNDS = 2000
PORT = 7077
RATE = 200e6


def one_way_s(rate: float = RATE) -> float:
    """Seconds, between two hosts whose links have ``rate`` bits per second.

    Raises:
        NetlabUnavailable: no bed can be made here.
    """
    with Netlab(even(2, rate)) as lab:
        here, there = lab.hosts
        program = [sys.executable, "-m", "bench.latency"]
        with subprocess.Popen(there.inside(*program, "answer"), stdout=subprocess.PIPE, text=True) as answering:
            assert answering.stdout is not None  # noqa: S101  for the type checker: it was asked for
            answering.stdout.readline()
            asked = subprocess.run(
                here.inside(*program, "ask", there.address), stdout=subprocess.PIPE, text=True, check=True
            )
    return float(asked.stdout)


def _answer() -> None:
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            for _ in range(ROUNDS):
                _receive(connection)
                connection.sendall(b"x")


def _ask(address: str) -> float:
    times_s = []
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            connection.sendall(b"x")
            _receive(connection)
            times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s) / 2


def _receive(connection: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.select()
    connection.recv(1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["answer"]:
            _answer()
        case ["ask", address]:
            print(_ask(address))
        case _:
            print(f"{one_way_s() * 1e6:.1f} µs")
