"""Samples that count as used: by named calls that were made, and are done on at least one rank."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import CollectiveAborted, ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from tests.elastic.support import Died, die

LENGTH, BATCH = 24, 6


class Name(enum.StrEnum):
    """Of calls."""

    GRADIENT = "gradient"
    LOSS = "loss"


GIVEN: tuple[Any, ...] = (
    "gradient", Name.GRADIENT, np.str_("gradient"), [Name.GRADIENT], ("gradient", Name.LOSS), {np.str_("gradient")},
)  # fmt: skip


async def trained(comms: Any, used_in: Any, attack: str = "") -> list[Any]:
    """How often each sample was used, by rank; the error that ended one, None if it was killed."""

    async def main(comm: Any) -> Any:
        used = np.zeros(LENGTH)
        try:
            async with Elastic(comm, State(x=used)) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH, seed=None), used_in=used_in):
                    await one_step(comm, step, used)
        except ConfigError as error:
            return str(error)
        except Died:
            return None
        return used.tolist()

    async def one_step(comm: Any, step: Any, used: Any) -> None:
        mask = np.zeros(LENGTH)
        mask[step.indices] = 1
        birth = comm.births[comm.rank]
        try:
            bad = attack == "refused" and step.number == 1 and birth == 1
            used += await comm.all_reduce(mask, Name.GRADIENT if birth else "gradient", timeout=-1 if bad else None)
        except (CollectiveAborted, ConfigError):
            pass
        if attack == "killed" and step.number == 1 and birth == 2:
            die(comms, comm)
        await comm.barrier("loss")

    return await run_ranks(comms, main)


@pytest.mark.parametrize("used_in", GIVEN, ids=str)
@pytest.mark.asyncio
async def test_samples_of_a_rank_that_dies_after_its_call_are_used_once(used_in: Any) -> None:
    async with world(3, elastic=True) as comms:
        one, two, three = await trained(comms, used_in, "killed")
        assert three is None
        is_both = isinstance(used_in, tuple)  # it has died before the other call
        assert one == two
        assert set(one) == ({1.0, 2.0} if is_both else {1.0})


@pytest.mark.parametrize("used_in", GIVEN, ids=str)
@pytest.mark.asyncio
async def test_samples_come_again_where_the_call_has_failed_on_all_ranks(used_in: Any) -> None:
    async with world(3, elastic=True) as comms:
        assert await trained(comms, used_in, "refused") == [[1.0] * LENGTH] * 3


@pytest.mark.asyncio
async def test_a_name_by_which_no_call_is_made_is_refused_on_all_ranks() -> None:
    async with world(3, elastic=True) as comms:
        one, two, three = await trained(comms, ["gradeint", "gradient"])
        assert one == two == three
        for part in ("used_in names 'gradeint', ", "step 0", "'gradient', 'loss'", "did you mean 'gradient'?"):
            assert part in one
    async with world(2, elastic=True) as comms:
        one, two = await trained(comms, "nonsense")
        assert one == two
        assert "names 'nonsense', and no call of step 0 has that name" in one


@pytest.mark.parametrize("wrong", ["", b"x", 3, [None, "a"], ["a\0b"]])
@pytest.mark.asyncio
async def test_invalid_names_in_used_in_are_refused(wrong: Any) -> None:
    async with world(1, elastic=True) as comms, Elastic(comms[0], State()) as elastic:
        with pytest.raises((ConfigError, TypeError)):
            await anext(elastic.steps(ElasticSampler(4, 2), used_in=wrong))


@pytest.mark.asyncio
async def test_steps_without_calls_and_names_that_were_met_before_tell_nothing() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> int:
            count = 0
            async with Elastic(comm, State()) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, BATCH), used_in="gradient"):
                    count += 1
                    if step.number == 1:
                        await comm.all_reduce(np.ones(2), "gradient")
                    elif step.number > 1:
                        await comm.barrier("other")
            return count

        assert await run_ranks(comms, main) == [4, 4]


def test_the_same_for_programs_without_an_event_loop() -> None:
    with sync_world(2, elastic=True) as comms:

        def main(comm: Any) -> str:
            with Elastic(comm, State()) as elastic:
                for _ in elastic.steps(ElasticSampler(LENGTH, BATCH), used_in="grad"):
                    comm.all_reduce(np.ones(2), name=Name.GRADIENT)
            return "nothing is wrong"

        def caught(comm: Any) -> str:
            with pytest.raises(ConfigError) as error:
                main(comm)
            return str(error.value)

        one, two = run_threads(list(comms), caught)
        assert one == two
        assert "did you mean 'gradient'?" in one
