"""Methods of the blocking interface for adapters of other libraries."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, ConfigError, RendezvousError
from kfcomm.joining import prepare
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.sync import Communicator
from kfcomm.sync.communicator import join
from kfcomm.testing import run_threads, sync_world


def test_a_timeout_for_calls_that_follow() -> None:
    def rank(comm: Communicator) -> None:
        comm.set_timeout(timedelta(milliseconds=30))
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeout, match="rank 0 within 0"):
                comm.all_reduce(np.ones(3), "late")
            with pytest.raises(CollectiveTimeout):
                comm.recv(1)
        comm.set_timeout(300)
        comm.barrier("end")

    with sync_world(2) as comms:
        run_threads(comms, rank)
        for wrong in (0, -1.0):
            with pytest.raises(ConfigError, match="number of seconds"):
                comms[0].set_timeout(wrong)


@pytest.mark.parametrize("name", ["grad/0", None])
def test_a_call_that_is_not_made(name: str | None) -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.refuse(name, ValueError("no such thing"))
        else:
            with pytest.raises(CollectiveAborted, match=r"rank 0 refused its call .*: no such thing"):
                comm.all_reduce(np.ones(3), name)
        assert comm.all_reduce(np.ones(3), name).tolist() == [3.0] * 3

    with sync_world(3) as comms:
        run_threads(comms, rank)


def test_calls_that_do_not_fit() -> None:
    """Every rank's call fails, those that wait and those that come later, also of ranks that know nothing of it."""

    def rank(comm: Communicator) -> None:
        call = comm.all_reduce if comm.rank else comm.broadcast
        if comm.rank == 2:
            comm.barrier("told")
        waiting = threading.Thread(target=tell, args=(comm,))
        waiting.start()
        with pytest.raises(CollectiveMismatch, match="both sides"):
            call(np.ones(3), name=f"~{call.__name__}")
        waiting.join()
        assert comm.all_reduce(np.ones(2), "~after").tolist() == [3.0] * 2

    def tell(comm: Communicator) -> None:
        if comm.rank != 2:
            comm.barrier("told")
        if comm.rank == 0:
            comm.mismatched("~broadcast", 0, "both sides")
            comm.mismatched("~all_reduce", 0, "both sides")

    with sync_world(3) as comms:
        run_threads(comms, rank)


def test_calls_that_come_after_their_mismatch() -> None:
    """They fail on the rank that has told of it, too; the next use of the name does not."""

    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.mismatched("~sum", 0, "both sides")
        comm.barrier("told")
        with pytest.raises(CollectiveMismatch, match="both sides"):
            comm.all_reduce(np.ones(3), "~sum", timeout=30)
        assert comm.all_reduce(np.ones(3), "~sum").tolist() == [2.0] * 3

    with sync_world(2) as comms:
        run_threads(comms, rank)


def test_names_for_order_may_overlap() -> None:
    def rank(comm: Communicator) -> list[Any]:
        handles = [comm.all_reduce_async(np.full(4, float(number)), "~sum") for number in range(5)]
        return [handle.wait()[0] for handle in handles]

    with sync_world(2) as comms:
        assert run_threads(comms, rank) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


class Meeting:
    """Ranks in threads of one process, who tell each other of themselves without a store."""

    def __init__(self, size: int) -> None:
        self._all_here = threading.Barrier(size)
        self._found: dict[int, PeerInfo] = {}

    async def exchange(self, me: PeerInfo) -> list[PeerInfo]:
        self._found[me.rank] = me
        self._all_here.wait()  # each rank has an I/O thread of its own, where nothing else goes on yet
        return [self._found[rank] for rank in sorted(self._found)]


def test_ranks_that_found_each_other_by_other_means() -> None:
    meeting, token = Meeting(2), secrets.token_hex(32)

    def rank(number: int) -> list[float]:
        settings = prepare(rank=number, size=2, store="http://127.0.0.1:1", serve=False, token=token, device="none")
        with join(settings, meeting.exchange) as comm:
            again = [comm.all_reduce(np.full(3, number + 1.0), "x")[0] for _ in range(3)]
            pair = comm.group([0, 1], "pair")
            pair.barrier()
            assert comm.agree(True)
            with pytest.raises(RendezvousError, match="without a store"):
                comm._io.wait_for(lambda: comm._session.network.membership.want_size(3))
            return again

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [[3.0] * 3] * 2
