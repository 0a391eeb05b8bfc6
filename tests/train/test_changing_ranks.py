"""Algorithms that are kept while ranks join and die: the same numbers as of one process that simulates the changes."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State
from kfcomm.testing import world
from kfcomm.train import Algorithm
from tests.elastic.support import Died
from tests.launch.launched import finished
from tests.train import reference
from tests.train.reference import RATE, Members, Reference, first_model, gradient

KINDS: dict[str, tuple[Algorithm, type[Reference]]] = {
    "ssgd": (Algorithm("ssgd"), reference.SSGD),
    "sma": (Algorithm("sma", alpha=0.2), reference.SMA),
    "ea-sgd": (Algorithm("ea-sgd", alpha=0.3, every=2), reference.EASGD),
    "local-sgd": (Algorithm("local-sgd", every=3), reference.LocalSGD),
    "diloco": (Algorithm("diloco", every=3), reference.DiLoCo),
    "local-adaalter": (Algorithm("local-adaalter", every=3, epsilon=0.5), reference.LocalAdaAlter),
    "adasgd": (Algorithm("adasgd", alpha=0.2, after=6), reference.AdaSGD),
}
NUM_STEPS = 16
DIES_AT = 10
"""Step, at the earliest, in which a rank of four dies."""
JOINS_AT = 3


def new_state(comm: Any, algorithm: Algorithm) -> State:
    way, model = algorithm.made(comm, first_model()), first_model()
    return State(way=way, model=PerRank(model, "mean") if algorithm.keeps_replicas else model, log=[])


def dies(comm: Any, state: State) -> bool:
    return comm.size == 4 and len(state.log) >= DIES_AT and comm.rank == 1


def done(state: State, comm: Any, moved: Any, along: Any) -> None:
    state.model = moved - RATE * along
    state.log = [*state.log, list(comm.births)]


async def train(comm: Any, algorithm: Algorithm, comms: Any, joins: Callable[[], None]) -> State:
    state = new_state(comm, algorithm)
    async with Elastic(comm, state) as elastic:
        async for _ in elastic.steps(ElasticSampler(1 << 12, 1)):
            number = len(state.log)
            if number == JOINS_AT and comm.rank == 0:
                joins()
            if dies(comm, state):
                comms.kill(comm.births[comm.rank])
                raise Died
            pending = state.way.parameters(state.model)
            along = await state.way.gradients(gradient(state.model, number, comm.rank))
            done(state, comm, await pending, along)
            if number >= NUM_STEPS and comm.size == 3:
                break
    return state


def check(kind: str, states: dict[int, State]) -> None:
    """Compare the remaining ranks with the reference, which goes through the ranks of each step."""
    log = [tuple(births) for births in next(iter(states.values())).log]
    assert {len(births) for births in log} == {2, 3, 4} or {len(births) for births in log} == {2, 4, 3}
    run = KINDS[kind][1](log[0])
    for number, births in enumerate(log):
        after = log[number + 1] if number + 1 < len(log) else births
        run.step(Members(births, tuple(b for b in births if b in after)), number)
    for birth, state in states.items():
        np.testing.assert_allclose(state.model, run.models[birth], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_kept_algorithm_follows_two_four_and_three_ranks(kind: str) -> None:
    algorithm = KINDS[kind][0]
    async with world(2, elastic=True, timeout=60) as comms:
        tasks: dict[int, asyncio.Task[State]] = {}

        async def new(birth: int) -> State:
            return await train(await comms.join(birth), algorithm, comms, lambda: None)

        def joins() -> None:
            tasks.update({birth: asyncio.create_task(new(birth)) for birth in (5, 7)})

        for birth, comm in enumerate(comms):
            tasks[birth] = asyncio.create_task(train(comm, algorithm, comms, joins))
        ended: dict[int, State] = {}
        while tasks:
            birth, task = tasks.popitem()
            try:
                ended[birth] = await task
            except Died:
                assert birth == 1
        assert set(ended) == {0, 5, 7}
        check(kind, ended)


@pytest.mark.slow
def test_algorithms_and_compressors_survive_a_sigkill(tmp_path: Path) -> None:
    """In one job of processes, all at once; each beside its reference."""
    program = [sys.executable, "-m", "tests.train.killed_program", str(tmp_path)]
    ended = finished("run", "-n", "2", "--elastic", "2:4", *program)
    assert ended.returncode == 0, ended.stderr
    said = {int(path.name): pickle.loads(path.read_bytes()) for path in tmp_path.iterdir()}
    log = [tuple(births) for births in next(iter(said.values()))["log"]]
    assert {len(births) for births in log} >= {2, 4}
    assert 1 not in log[-1]
    runs = {kind: reference_(log[0]) for kind, (_, reference_) in KINDS.items()}
    power, top = reference.PowerSGD(log[0]), reference.TopK(log[0])
    for number, births in enumerate(log):
        after = log[number + 1] if number + 1 < len(log) else births
        members = Members(births, tuple(b for b in births if b in after))
        for run in (*runs.values(), power, top):
            run.step(members, number)
    assert said.keys() == set(log[-1])
    for birth, found in said.items():
        for kind, run in runs.items():
            np.testing.assert_allclose(found[kind], run.models[birth], rtol=1e-12, atol=1e-12, err_msg=kind)
        np.testing.assert_allclose(found["power_sum"], power.total, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found["top_sum"], top.total, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found["left"], [power.errors[birth], top.errors[birth]], rtol=1e-11, atol=1e-11)
