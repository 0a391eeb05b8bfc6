"""Programs in which searches in virtual time have found defects."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.errors import CollectiveTimeout, EpochChanged, Partitioned, PeerLost
from kfcomm.testing import Join, Kill, LostStore, Partition, Stop, run_in_virtual_time


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


async def enter(comm: Any) -> int:
    """Take the state of the lowest rank that lives."""
    state = State(birth=comm.births[comm.rank])
    async with Elastic(ElasticCommunicator(comm), state):
        return int(state.birth)


def test_all_hear_of_a_lost_root_although_another_rank_is_lost_next() -> None:
    """A rank without news of the lost sender of the state saw a call that had failed on another rank."""
    for seed in range(66, 87):
        random = Random(seed)
        events: list[Any] = [
            Kill(0, random.uniform(0.001, 0.006)),
            Kill(2, random.uniform(0.015, 0.025)),
            Stop(1, random.uniform(0.01, 0.02), 0.3),
        ]
        run = run_in_virtual_time(enter, 5, seed=seed, events=events, strategy="chain_star", timeout=30.0)
        assert run.failed == {}
        assert len(set(run.results.values())) == 1


async def train(comm: Any) -> None:
    """Some steps in which nothing is exchanged."""
    async with Elastic(ElasticCommunicator(comm), State()) as elastic:
        async for _ in elastic.steps(ElasticSampler(12, 2)):
            await asyncio.sleep(0.001)


async def long_train(comm: Any) -> tuple[int, ...]:
    """The same, for long enough that others come; who took part in the end."""
    elastic_comm = ElasticCommunicator(comm)
    async with Elastic(elastic_comm, State()) as elastic:
        async for _ in elastic.steps(ElasticSampler(240, 4)):
            await elastic_comm.all_reduce(np.ones(2), "x")
            await asyncio.sleep(0.01)
    return elastic_comm.births


async def resized(comm: Any) -> tuple[int, ...]:
    """Grow to five by a call of all, without an ``Elastic``, and go on with those that live; who takes part then."""
    elastic_comm = ElasticCommunicator(comm)
    is_asked = comm.epoch > 0
    while elastic_comm.size != 3:
        try:
            if not is_asked:
                is_asked = True
                await elastic_comm.resize(5)
            await elastic_comm.all_reduce(np.ones(2))
        except (PeerLost, EpochChanged):
            await elastic_comm.shrink()
        await asyncio.sleep(0.001)
    return elastic_comm.births


def test_missing_rank_of_a_new_epoch_is_not_waited_for() -> None:
    """The store lets one of two ranks continue with a joining rank; the other has ended by then."""
    for seed in range(15):
        random = Random(seed)
        events: list[Any] = [Join(2, 0.0), Partition(((1,),), random.uniform(0.005, 0.03), 3.0)]
        run = run_in_virtual_time(train, 2, seed=seed, events=events, strategy="star", timeout=30.0)
        assert not any(isinstance(error, CollectiveTimeout) for error in run.failed.values())


def test_joining_rank_is_admitted_although_both_ranks_that_report_to_the_store_are_lost() -> None:
    """The others tell it then: else they wait for a rank of their epoch that has never heard of it."""
    for seed in range(5):
        for lost_s, killed_s in ((0.006, 0.042), (0.008, 0.04), (0.01, 0.042)):
            events: list[Any] = [
                Join(4, 0.004),
                LostStore(lost_s, 0.5),
                Kill(0, killed_s),
                Kill(1, killed_s),
            ]
            run = run_in_virtual_time(long_train, 4, seed=seed, events=events, strategy="chain_star", timeout=20.0)
            assert run.failed == {}


async def idle(comm: Any) -> None:
    """No steps: all leave after a while."""
    async with Elastic(ElasticCommunicator(comm), State()):
        await asyncio.sleep(0.05)


def test_leaving_rank_sees_why_the_change_failed() -> None:
    """It heard that the agreement of that change was still under way."""
    for seed in range(5):
        events: list[Any] = [Kill(0, 0.04), Stop(1, 0.04, 3.0)]
        run = run_in_virtual_time(idle, 3, seed=seed, events=events, timeout=30.0)
        assert isinstance(run.failed[2], Partitioned)


def test_rank_joins_by_resize_although_both_ranks_that_report_to_the_store_are_lost() -> None:
    for seed in range(2):
        for killed_s in (0.02, 0.025, 0.03):
            events: list[Any] = [Join(4, 0.004), LostStore(0.008, 0.5), Kill(0, killed_s), Kill(1, killed_s)]
            run = run_in_virtual_time(resized, 4, seed=seed, events=events, strategy="chain_star", timeout=20.0)
            assert run.failed == {}
            assert set(run.results.values()) == {(2, 3, 4)}


async def agree_and_leave(comm: Any) -> list[bool]:
    """Agree some times, and end."""
    return [await comm.agree(True) for _ in range(3)]


def test_leaving_rank_has_passed_on_the_decision() -> None:
    """A rank without news from the first, which was stopped, was alone, and did not know how the others had ended."""
    for seed, at_s in ((584, 0.0076447), (1181, 0.0073677), (1427, 0.0076658), (1495, 0.0078817), (2938, 0.0064288)):
        run = run_in_virtual_time(agree_and_leave, 3, seed=seed, events=[Stop(0, at_s, 3.0)], timeout=30.0)
        assert run.results[1] == run.results[2] == 3 * [True]
