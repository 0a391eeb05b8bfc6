"""The same for programs without an event loop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.call_log import Standing
from kfcomm.errors import CollectiveMismatch, ConfigError, PeerLost
from kfcomm.sync.elastic import Elastic as Blocking
from kfcomm.testing import run_threads, sync_world
from tests.elastic.support import Died


def test_errors_are_raised_unchanged_at_the_callers_line() -> None:
    def differing(comm: Any) -> None:
        with Elastic(comm, State(x=np.zeros(3 + comm.rank))):
            pytest.fail("the states are not alike")

    def without_own(comm: Any) -> None:
        with Elastic(comm, State(x=np.zeros(3))) as elastic:
            elastic.commit()

    def not_open(comm: Any) -> None:
        next(iter(Elastic(comm, State(x=np.zeros(3))).steps(ElasticSampler(3, 1))))

    def with_other_samplers(comm: Any) -> None:
        with Elastic(comm, State(x=np.zeros(3))) as elastic:
            next(elastic.steps(ElasticSampler(30 + comm.rank, 3)))

    wrong = {
        differing: (ConfigError, "the ranks differ"), without_own: (ConfigError, "nothing is this rank's own"),
        not_open: (ConfigError, "it is not open"), with_other_samplers: (CollectiveMismatch, "equal samplers"),
    }  # fmt: skip
    for program, (kind, words) in wrong.items():
        with sync_world(2, elastic=True) as comms:

            def caught(comm: Any, program: Any = program, kind: Any = kind, words: str = words) -> list[str]:
                with pytest.raises(kind, match=words) as error:
                    program(comm)
                return [frame.name for frame in error.traceback if "/kfcomm/" in str(frame.path)]

            for frames in run_threads(list(comms), caught):
                assert "__aenter__" not in frames


def test_a_rank_dies_and_another_joins() -> None:
    with sync_world(3, elastic=True) as comms:
        joined: list[Any] = []
        used = np.zeros(300)

        def main(comm: Any, birth: int) -> Any:
            state = State(total=np.zeros(300), births=[birth])
            try:
                with Elastic(comm, state) as elastic:
                    assert isinstance(elastic, Blocking)
                    for step in elastic.steps(ElasticSampler(300, 6), used_in="used"):
                        if birth == 1 and step.number == 4:
                            comms.kill(1)
                            raise Died
                        if birth == 0 and step.number == 8:
                            thread = threading.Thread(target=lambda: joined.append(main(comms.join(3), 3)))
                            thread.start()
                            threads.append(thread)
                        mask = np.zeros(300)
                        mask[step.indices] = 1
                        handle = comm.all_reduce_async(mask, name="used")
                        x = np.ones(4)
                        comm.all_reduce(x, name="x", out=x)
                        assert (comm.all_reduce(np.ones(4), name="y") == comm.all_reduce(np.ones(4))).all()
                        state.total += handle.wait()
                        assert set(handle.contributors) <= {0, 1, 2, 3}
                        comm.barrier("b")
                        if birth == 0:
                            used[:] = state.total
            except Died:
                return None
            return comm.births, elastic.num_changes, elastic.paused_s > 0, elastic.is_released

        threads: list[threading.Thread] = []
        results = run_threads(list(comms), lambda comm: main(comm, comm.births[comm.rank]))
        for thread in threads:
            thread.join()
        assert results[1] is None
        assert results[0] == results[2] == ((0, 2, 3), 2, True, False)
        assert joined == [((0, 2, 3), 0, False, False)]
        assert (used == 1).all()


def test_a_step_runs_again() -> None:
    with sync_world(3, elastic=True) as comms:

        def main(comm: Any) -> Any:
            state, sums = State(x=np.zeros(1)), []
            try:
                with Elastic(comm, state, on_loss="restart_step") as elastic:
                    for step in elastic.steps(ElasticSampler(12, 3)):
                        with step:
                            state.x += 1
                            if comm.births[comm.rank] == 2 and step.number == 2:
                                comms.kill(2)
                                raise Died
                            sums.append(comm.all_reduce(np.ones(1), name="x")[0])
            except Died:
                return None
            return sums, state.x[0]

        results = run_threads(list(comms), main)
        assert results == [([3.0, 3.0, 2.0, 2.0], 4.0)] * 2 + [None]


def test_a_short_call_that_is_interrupted_has_failed() -> None:
    with sync_world(2, elastic=True) as comms:
        comm: Any = comms[0]
        leave = threading.Event()

        def other() -> None:
            with contextlib.suppress(Died), Elastic(comms[1], State()):
                leave.wait()
                raise Died

        def interrupt() -> None:
            turns, engine = comm._driver.turns, comm._session.engine
            while not (turns.is_resting and engine.router.live) and not leave.is_set():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        threads = [threading.Thread(target=target) for target in (other, interrupt)]
        try:
            threads[0].start()
            with Elastic(comm, State()):
                threads[1].start()
                with pytest.raises(KeyboardInterrupt):
                    comm.barrier("b")
                entries = comm._inner._calls.log.entries
                assert entries["b", 0].standing is Standing.FAILED
                comms.kill(1)
                comm.barrier("b")
                assert (comm.size, entries["b", 1].contributors) == (2, (0,))
        finally:
            leave.set()
            for thread in threads:
                thread.join()


def test_it_is_a_communicator_in_all_else() -> None:
    with sync_world(2, elastic=True) as comms:

        def main(comm: Any) -> None:
            assert repr(comm).startswith("<ElasticCommunicator 'world', rank")
            assert comm.size == 2
            assert comm.all_reduce(np.ones(2)).tolist() == [2, 2]
            comm.set_strategy("ring")
            assert comm.strategy.name == "ring"
            assert comm.agree(True)
            if comm.rank == 0:
                comm.send(np.ones(1), 1)
            else:
                comm.recv(0)
            assert comm.shrink() is comm
            assert comm.epoch == 1
            comm.barrier()
            assert comm.statistics() is not None
            with pytest.raises(AttributeError):
                comm.no_such_verb()
            with pytest.raises(ConfigError, match="a size is a whole number"):
                comm.propose_size(0)

        run_threads(list(comms), main)
        comms.kill(1)
        comm: Any = comms[0]
        with pytest.raises(PeerLost):
            comm.barrier()
        assert comm.shrink().size == 1


def test_a_world_of_one() -> None:
    with kfcomm.sync.init(rank=0, size=1, elastic=True) as comm:
        seen = []
        with Elastic(comm, State(x=np.zeros(2))) as elastic:
            for _ in range(2):
                seen += [step.indices.tolist() for step in elastic.steps(ElasticSampler(5, 2, seed=None))]
        assert seen == [[0, 1], [2, 3], [4]] * 2
        with pytest.raises(ConfigError, match="no store"):
            comm.propose_size(2)  # type: ignore[attr-defined]
