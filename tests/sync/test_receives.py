"""Blocking receives that end without their message leave it to the next one, over every link."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveTimeout
from kfcomm.sync import Communicator
from tests.sync.worlds import TRANSPORTS, Call, joined

BIG = np.arange(100_000)
COUNT = 12
SOON_S = 1e-4

POLLS: dict[str, Callable[[Communicator], Any]] = {
    "recv": lambda comm: comm.recv(1, timeout=SOON_S),
    "out": lambda comm: comm.recv(1, out=np.zeros_like(BIG), timeout=SOON_S),
    "recv_any": lambda comm: comm.recv_any(timeout=SOON_S)[0],
    "queue": lambda comm: comm.queue("q", 1, 0).get(timeout=SOON_S),
    "recv_object": lambda comm: comm.recv_object(1, timeout=SOON_S),
    "recv_async": lambda comm: _waited(comm.recv_async(1)),
    "recv_init": lambda comm: _waited(comm.recv_init(1).start()),
}


def _waited(handle: Any) -> Any:
    try:
        return handle.wait(SOON_S)
    except TimeoutError:
        handle.cancel()
    return handle.wait()


def give_all(comm: Communicator, form: str) -> None:
    queue = comm.queue("q", 1, 0)
    for number in range(COUNT):
        x = np.full_like(BIG, number)
        if form == "queue":
            queue.put(x)
        elif form == "recv_object":
            comm.send_object([number], 0)
        else:
            comm.send(x, 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("form", POLLS)
def test_polling_takes_every_message_once_and_in_order(form: str, transport: str) -> None:
    with joined(transport) as comms:
        giving, got = Call(give_all, comms[1], form), []
        while len(got) < COUNT:
            try:
                got.append(np.asarray(POLLS[form](comms[0])))
            except (CollectiveTimeout, concurrent.futures.CancelledError):
                continue
        assert giving.error() is None
        assert [int(x[0]) for x in got] == list(range(COUNT))
        assert all((x == x[0]).all() for x in got)
        assert not comms[0]._inner._mailbox._streams


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_of_a_receive_that_has_ended_is_the_callers_again(transport: str) -> None:
    with joined(transport) as comms:
        for _ in range(5):
            out = np.zeros_like(BIG)
            sent = comms[1].send_async(BIG, 0)
            first = comms[0].recv_async(1, out=out)
            if first.cancel():
                out[:] = -1
                assert (comms[0].recv(1) == BIG).all()
                assert (out == -1).all()
            sent.wait()
