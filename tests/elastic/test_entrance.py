"""The first agreement: a job with a checkpoint never starts from step 0, for any lost rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.elastic.checkpoint import Checkpoint, about_of
from kfcomm.errors import ConfigError
from kfcomm.testing import Kill, VirtualRun, run_in_virtual_time, run_ranks, world
from tests.elastic.support import Died
from tests.search.resumed import slow_checkpoints

LENGTH, PASSES, LAST = 12, 2, 3
STEPS = LENGTH // 4 * PASSES
WHOLE = (LAST, [float(PASSES)] * LENGTH)


async def train(comm: Any, path: Path | None, last: int | None = None, **options: Any) -> Any:
    """Train for two passes; the number of the first step, and how often each sample was used."""
    state, numbers = State(used=np.zeros(LENGTH)), []
    async with Elastic(comm, state, **{"checkpoint": path, "checkpoint_every": 1} | options) as elastic:
        async for step in elastic.steps(ElasticSampler(LENGTH, 4), passes=PASSES, used_in="used"):
            numbers.append(step.number)
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            state.used += await comm.all_reduce(mask, "used")
            if step.number == last:
                raise Died
    return numbers[0], state.used.tolist()


async def train_all(size: int, path: Path, last: int | None = None) -> list[Any]:
    """The same in a world of so many ranks, which all die after step ``last``."""

    async def main(comm: Any) -> Any:
        try:
            return await train(comm, path, last)
        except (Died, ConfigError) as error:
            return error

    async with world(size, elastic=True) as comms:
        return await run_ranks(comms, main)


def lost(path: Path) -> bytes:
    """The checkpoint of a job that was lost as a whole after step `LAST`."""

    async def main(comm: Any) -> Any:
        return await train(ElasticCommunicator(comm), path, LAST)

    with slow_checkpoints():
        run = run_in_virtual_time(main, 1)
    assert isinstance(run.results[0], Died)
    return path.read_bytes()


def resumed(path: Path, events: list[Any], size: int = 3, **options: Any) -> VirtualRun:
    """A job that finds it there, in virtual time; each host has a folder of its own if there are several."""

    async def main(comm: Any) -> Any:
        host = comm.layout.hosts[comm.rank]
        here = path if host == 0 else path.with_name(f"of host {host}")
        return await train(ElasticCommunicator(comm), here)

    with slow_checkpoints():
        return run_in_virtual_time(main, size, events=events, monitor=False, **options)


MOMENTS = [0.0013 * n for n in range(45)]
"""From the beginning until the first steps: to look at the file and to read it takes 10 ms each, about."""


@pytest.mark.parametrize("doomed", [(0,), (0, 1), (1,)])
def test_another_rank_reads_it_if_one_dies_at_any_moment(
    doomed: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / "c.npz"
    data = lost(path)
    for at_s in MOMENTS:
        path.write_bytes(data)
        run = resumed(path, [Kill(rank, at_s + 0.003 * rank) for rank in doomed])
        assert run.failed == {}
        assert set(map(str, run.results.values())) == {str(WHOLE)}, at_s
        found = about_of(path)
        assert found is not None
        # A writer that dies when the others have ended training, just before it writes, leaves the file one step back.
        assert found[0].number >= STEPS - 1


def test_ranks_end_if_only_the_dead_rank_saw_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each host has a file of its own, and there is one on the first host alone."""
    caplog.set_level(logging.CRITICAL)
    path = tmp_path / "c.npz"
    data = lost(path)
    told = set()
    for at_s in MOMENTS:
        path.write_bytes(data)
        for other in tmp_path.glob("of host*"):
            other.unlink()
        run = resumed(path, [Kill(0, at_s)], hosts=3)
        if run.failed:
            assert {type(one) for one in run.results.values()} == {ConfigError}, at_s
            told |= {str(one).partition(":")[0] for one in run.failed.values()}
            assert path.read_bytes() == data
        else:
            assert set(map(str, run.results.values())) == {str(WHOLE)}, at_s
    names = [repr(str(tmp_path / f"of host {host}")) for host in (1, 2)]
    saw = [f"rank 0 is lost, which saw checkpoint {name} of step {LAST}, and no other rank sees it" for name in names]
    before = "rank 0 was lost before it reported whether it sees a checkpoint"
    assert told == {*saw, *(f"{before} {name}, and no rank is left on its host that could" for name in names)}


def test_one_that_the_first_rank_does_not_see_is_read_by_one_that_does(tmp_path: Path) -> None:
    data = lost(tmp_path / "of host 1")
    run = resumed(tmp_path / "c.npz", [], hosts=3)
    assert set(map(str, run.results.values())) == {str(WHOLE)}
    (tmp_path / "c.npz").unlink()
    (tmp_path / "of host 2").write_bytes(data)
    lost(tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "of host 1")
    run = resumed(tmp_path / "c.npz", [], hosts=3)
    assert all("is not the same file on all ranks: it is one of step" in str(one) for one in run.failed.values())
    assert len(run.failed) == 3


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (
            {"on_loss": "raise"},
            "on_loss of an Elastic is the same on all ranks: it is 'finish' on rank 0 and 'raise' on",
        ),
        ({"checkpoint_every": 7}, "checkpoint_every of an Elastic .* it is 1 on rank 0 and 7 on rank 2"),
        ({"checkpoint": None}, "checkpoint of an Elastic .* it is 'a path' on rank 0 and 'None' on rank 2"),
        ({"copies": 2}, "copies of an Elastic .* it is 1 on rank 0 and 2 on rank 2"),
        ({"own": State()}, "own of an Elastic .* it is 'None' on rank 0 and 'a State' on rank 2"),
    ],
)
@pytest.mark.asyncio
async def test_options_that_differ_are_told_to_all_at_once(mine: dict[str, Any], words: str, tmp_path: Path) -> None:
    async def main(comm: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            await train(comm, tmp_path / "c.npz", **(mine if comm.rank == 2 else {}))

    async with world(3, elastic=True, timeout=3600) as comms:
        await run_ranks(comms, main)


class Unreadable:
    """An array that cannot be read any more, as one of JAX that was donated."""

    is_there = True

    def __array__(self, *_: Any) -> Any:
        if not self.is_there:
            raise RuntimeError("Array has been deleted")
        return np.zeros(2)


@pytest.mark.asyncio
async def test_a_state_that_cannot_be_read_on_one_rank_is_told_to_all() -> None:
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> None:
            state = State(x=Unreadable())
            state.x.is_there = comm.rank != 1
            with pytest.raises(ConfigError, match=r"^rank 1: the state cannot be read: .*Array has been deleted"):
                await Elastic(comm, state).__aenter__()

        await run_ranks(comms, main)


@pytest.mark.parametrize(
    ("mine", "others", "words"),
    [
        ({"a": 1}, {"b": 1}, "this rank's has"),
        ({"a": [np.ones(1)]}, {"a": {0: np.ones(1)}}, "lists and dictionaries are others"),
    ],
)
@pytest.mark.asyncio
async def test_states_of_other_forms_are_told_to_all(mine: dict[str, Any], others: dict[str, Any], words: str) -> None:
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> None:
            with pytest.raises(ConfigError, match=f"states of the ranks differ: .*{words}"):
                await Elastic(comm, State(**(mine if comm.rank == 0 else others))).__aenter__()

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_a_job_does_not_write_over_a_checkpoint_that_it_has_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job has written it meanwhile; or has gone on from what this one wrote."""
    path = tmp_path / "c.npz"
    theirs = Checkpoint(path, 1, State(n=7))
    theirs.lineage = ["0a"]
    theirs.look(5, "theirs")
    await theirs.close()
    mine = Checkpoint(path, 1, State(n=1))
    mine.lineage = ["0b"]
    mine.look(9, "mine")
    await mine.close()
    assert "it belongs to another job, and this job has not read it" in caplog.text
    next_one = Checkpoint(path, 1, State(n=0))
    assert await next_one.read() == "theirs"
    next_one.lineage = [*next_one.lineage, "0c"]
    next_one.look(6, "next")
    await next_one.close()
    late = Checkpoint(path, 1, State(n=8))
    late.lineage = ["0a"]
    late.look(10, "late")
    await late.close()
    assert await Checkpoint(path, 1, State(n=0)).read() == "next"
