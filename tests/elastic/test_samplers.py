"""Several samplers in one program, in turns or one within a step of another: each has a place of its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State, checkpoint
from kfcomm.errors import CollectiveMismatch, ConfigError, EpochChanged
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from tests.elastic.support import Died
from tests.search.resumed import Inline

EPOCHS = 3


class Turns:
    """Training and validation in turns, by passes that are counted or by a number in the state."""

    def __init__(self, lengths: dict[str, int], form: str, **options: Any) -> None:
        self.lengths = lengths
        self.form = form
        self.options = options

    async def run(self, comm: Any, on_step: Callable[[str, int, Any], Any]) -> Any:
        """One rank's life; ``on_step(kind, epoch, step)`` may end it."""
        state = State(train=np.zeros(self.lengths["train"]), val=np.zeros(self.lengths["val"]), epoch=0)
        samplers = {kind: ElasticSampler(length, 4) for kind, length in self.lengths.items()}
        async with Elastic(comm, state, **self.options) as elastic:
            for number in range(EPOCHS):
                if self.form == "state" and number < state.epoch:
                    continue
                for kind, sampler in samplers.items():
                    passes = number + 1 if self.form == "passes" else None
                    async for step in elastic.steps(sampler, passes=passes, used_in="used"):
                        with guard(step, self.options.get("on_loss", "finish")):
                            await on_step(kind, number, step)
                            mask = np.zeros(sampler.length)
                            mask[step.indices] = 1
                            total = await comm.all_reduce(mask, name="used")
                            setattr(state, kind, getattr(state, kind) + total)
                if not elastic.is_replaying:
                    state.epoch = number + 1
        return state.train.tolist(), state.val.tolist(), state.epoch, comm.births


def guard(step: Any, on_loss: str) -> Any:
    """Around the body of a step, as this way to meet a loss asks for."""
    return step if on_loss == "restart_step" else contextlib.suppress(EpochChanged)


def right(lengths: dict[str, int], births: tuple[int, ...]) -> Any:
    return [float(EPOCHS)] * lengths["train"], [float(EPOCHS)] * lengths["val"], EPOCHS, births


@pytest.mark.parametrize("lengths", [{"train": 24, "val": 12}, {"train": 12, "val": 12}])
@pytest.mark.parametrize("form", ["passes", "state"])
@pytest.mark.parametrize("on_loss", ["finish", "raise", "restart_step"])
@pytest.mark.parametrize(("kind", "epoch"), [("train", 1), ("val", 0), ("val", 1)])
@pytest.mark.asyncio
async def test_a_rank_joins_and_one_dies_in_each_of_two_walks_in_turns(
    lengths: dict[str, int], form: str, on_loss: str, kind: str, epoch: int
) -> None:
    turns = Turns(lengths, form, on_loss=on_loss)
    async with world(3, elastic=True) as comms:
        is_asked = asyncio.Event()
        counts: Counter[tuple[int, str, int]] = Counter()

        async def on_step(birth: int, at: tuple[str, int], step: Any) -> None:
            counts[birth, *at] += 1
            if at == (kind, epoch) and counts[birth, *at] == 2:
                if birth == 1:
                    comms.kill(1)
                    raise Died
                if birth == 0:
                    is_asked.set()

        async def main(comm: Any, birth: int) -> Any:
            try:
                return await turns.run(comm, lambda kind, epoch, step: on_step(birth, (kind, epoch), step))
            except Died:
                return None

        async def newcomer() -> Any:
            await is_asked.wait()
            return await main(await comms.join(3), 3)

        comer = asyncio.create_task(newcomer())
        found = await run_ranks(comms, lambda comm: main(comm, comm.births[comm.rank]))
        assert await comer == found[0] == found[2] == right(lengths, (0, 2, 3))
        assert found[1] is None


@pytest.mark.parametrize("form", ["passes", "state"])
@pytest.mark.parametrize("last", [("train", 0, 2), ("val", 0, 2), ("train", 1, 1), ("val", 1, 1), ("val", 2, 3)])
@pytest.mark.parametrize("lengths", [{"train": 24, "val": 12}, {"train": 12, "val": 12}])
@pytest.mark.asyncio
async def test_a_job_goes_on_from_a_checkpoint_of_either_walk(
    lengths: dict[str, int], form: str, last: tuple[str, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", Inline)  # it is written before the step begins
    turns = Turns(lengths, form, checkpoint=tmp_path / "c.npz", checkpoint_every=1)

    async def run(size: int, end: tuple[str, int, int] | None) -> list[Any]:
        async def main(comm: Any) -> Any:
            counts: Counter[tuple[str, int]] = Counter()

            async def on_step(kind: str, epoch: int, step: Any) -> None:
                counts[kind, epoch] += 1
                if (kind, epoch, counts[kind, epoch]) == end:
                    raise Died

            try:
                return await turns.run(comm, on_step)
            except Died:
                return "died"

        async with world(size, elastic=True) as comms:
            return await run_ranks(comms, main)

    assert await run(2, last) == ["died"] * 2
    with np.load(tmp_path / "c.npz") as file:
        assert file["train"].any()
    assert await run(3, None) == [right(lengths, (0, 1, 2))] * 3


class Nested:
    """A pass of validation within each other step of training."""

    TRAIN, VAL = 24, 8

    async def run(self, comm: Any, on_step: Callable[[str, Any], Any], **options: Any) -> Any:
        state = State(train=np.zeros(self.TRAIN), val=np.zeros(self.VAL), validations=0)
        train, val = ElasticSampler(self.TRAIN, 4), ElasticSampler(self.VAL, 4)
        on_loss = options["on_loss"]
        async with Elastic(comm, state, **options) as elastic:
            async for step in elastic.steps(train, passes=2, used_in="train"):
                with guard(step, on_loss):
                    await on_step("train", step)
                    await self._use(comm, state, "train", step)
                    if step.number % 2:
                        async for one in elastic.steps(val, used_in="val"):
                            with guard(one, on_loss):
                                await on_step("val", one)
                                await self._use(comm, state, "val", one)
                        state.validations += 1
        return state.train.tolist(), set(state.val.tolist()), state.validations, comm.births

    async def _use(self, comm: Any, state: State, kind: str, step: Any) -> None:
        mask = np.zeros(len(getattr(state, kind)))
        mask[step.indices] = 1
        setattr(state, kind, getattr(state, kind) + await comm.all_reduce(mask, name=kind))


@pytest.mark.parametrize("on_loss", ["finish", "raise", "restart_step"])
@pytest.mark.parametrize("kind", ["train", "val"])
@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.asyncio
async def test_validation_within_a_step(on_loss: str, kind: str, number: int, tmp_path: Path) -> None:
    """Samples of the outer step stay used if a rank dies in the inner one; a rank joins after the step."""
    nested = Nested()
    async with world(3, elastic=True) as comms:
        is_asked = asyncio.Event()
        counts: Counter[tuple[int, str]] = Counter()
        seen: list[tuple[str, int]] = []

        async def main(comm: Any, birth: int) -> Any:
            async def on_step(what: str, step: Any) -> None:
                counts[birth, what] += 1
                seen.append((what, comm.size))
                if (what, counts[birth, what]) == (kind, number):
                    if birth == 1:
                        comms.kill(1)
                        raise Died
                    if birth == 0:
                        is_asked.set()

            try:
                return await nested.run(
                    comm, on_step, on_loss=on_loss, checkpoint=tmp_path / "c.npz", checkpoint_every=1
                )
            except Died:
                return None

        async def newcomer() -> Any:
            await is_asked.wait()
            return await main(await comms.join(3), 3)

        comer = asyncio.create_task(newcomer())
        found = await run_ranks(comms, lambda comm: main(comm, comm.births[comm.rank]))
        last = await comer
        assert last == found[0] == found[2]
        assert last[0] == [2.0] * nested.TRAIN
        assert len(last[1]) == 1
        assert last[3] == (0, 2, 3)


def test_two_walks_in_turns_for_programs_without_an_event_loop() -> None:
    with sync_world(2, elastic=True) as comms:

        def main(comm: Any) -> Any:
            state = State(train=np.zeros(12), val=np.zeros(6))
            samplers = {"train": ElasticSampler(12, 4), "val": ElasticSampler(6, 4, name="val")}
            with Elastic(comm, state) as elastic:
                for number in range(EPOCHS):
                    for kind, sampler in samplers.items():
                        for step in elastic.steps(sampler, passes=number + 1):
                            mask = np.zeros(sampler.length)
                            mask[step.indices] = 1
                            setattr(state, kind, getattr(state, kind) + comm.all_reduce(mask, name="used"))
                assert not elastic.is_replaying
            return set(state.train.tolist()), set(state.val.tolist())

        assert run_threads(list(comms), main) == [({3.0}, {3.0})] * 2


@pytest.mark.asyncio
async def test_a_walk_that_is_broken_off_gives_back_what_a_dead_rank_had() -> None:
    """The step in which it was broken off is over at the next boundary, whichever walk that belongs to."""
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state = State(used=np.zeros(12))
            train, val = ElasticSampler(12, 6), ElasticSampler(4, 4)
            try:
                async with Elastic(comm, state) as elastic:
                    for _ in range(3):
                        async for step in elastic.steps(train, passes=1, used_in="used"):
                            if comm.births[comm.rank] == 1:
                                comms.kill(1)
                                raise Died
                            mask = np.zeros(12)
                            mask[step.indices] = 1
                            state.used += await comm.all_reduce(mask, name="used")
                            break
                        async for _ in elastic.steps(val):
                            await comm.barrier()
            except Died:
                return None
            return state.used.tolist()

        assert await run_ranks(comms, main) == [[1.0] * 12, None, [1.0] * 12]


@pytest.mark.parametrize("on_loss", ["finish", "raise", "restart_step"])
@pytest.mark.asyncio
async def test_samples_of_a_rank_that_dies_in_a_walk_before_the_call_of_the_outer_step_come_again(on_loss: str) -> None:
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state = State(used=np.zeros(24))
            train, val = ElasticSampler(24, 6), ElasticSampler(8, 4)
            try:
                async with Elastic(comm, state, on_loss=on_loss) as elastic:
                    async for step in elastic.steps(train, used_in="used"):
                        with guard(step, on_loss):
                            async for one in elastic.steps(val, used_in="val"):
                                with guard(one, on_loss):
                                    if step.number > 0 and comm.births[comm.rank] == 1:
                                        comms.kill(1)
                                        raise Died
                                    await comm.barrier("val")
                            mask = np.zeros(24)
                            mask[step.indices] = 1
                            state.used += await comm.all_reduce(mask, name="used")
            except Died:
                return None
            return state.used.tolist()

        assert await run_ranks(comms, main) == [[1.0] * 24, None, [1.0] * 24]


@pytest.mark.asyncio
async def test_a_call_that_fails_after_a_walk_within_its_step_was_broken_off_voids_the_step() -> None:
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state = State(used=np.zeros(24))
            train, val = ElasticSampler(24, 6), ElasticSampler(8, 4)
            try:
                async with Elastic(comm, state, on_loss="raise") as elastic:
                    async for step in elastic.steps(train):
                        async for _ in elastic.steps(val, passes=99):
                            await comm.barrier("val")
                            break
                        if step.number > 2 and comm.births[comm.rank] == 1:
                            comms.kill(1)
                            raise Died
                        mask = np.zeros(24)
                        mask[step.indices] = 1
                        with contextlib.suppress(EpochChanged):
                            state.used += await comm.all_reduce(mask, name="used")
            except Died:
                return None
            return state.used.tolist()

        assert await run_ranks(comms, main) == [[1.0] * 24, None, [1.0] * 24]


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ({"passes": 2}, "passes=2"),
        ({"used_in": "x"}, r"used_in=\['x'\]"),
        ({"sampler": ElasticSampler(9, 4)}, "0 of 9 given"),
        ({"sampler": ElasticSampler(8, 4, name="mine")}, "sampler 'mine'"),
    ],
)
@pytest.mark.asyncio
async def test_arguments_that_differ_are_told_to_all_at_once(mine: dict[str, Any], words: str) -> None:
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> str:
            given: dict[str, Any] = {"sampler": ElasticSampler(8, 4)} | (mine if comm.rank == 2 else {})
            try:
                async with Elastic(comm, State()) as elastic:
                    async for _ in elastic.steps(**given):
                        pass
            except CollectiveMismatch as error:
                return str(error)
            return "no error"

        texts = set(await run_ranks(comms, main))
        assert len(texts) == 1
        text = texts.pop()
        assert "rank 0 begins step 0" in text
        assert re.search(f"rank 2 begins step 0 with .*{words}", text)


@pytest.mark.asyncio
async def test_a_rank_that_leaves_while_others_begin_a_step_is_told_with_them() -> None:
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> str:
            try:
                async with Elastic(comm, State()) as elastic:
                    for _ in range(1 if comm.rank == 1 else 2):
                        async for _ in elastic.steps(ElasticSampler(8, 4)):
                            await comm.barrier()
            except CollectiveMismatch as error:
                return str(error)
            return "no error"

        assert len({text for text in await run_ranks(comms, main) if "rank 1 leaves the Elastic" in text}) == 1


@pytest.mark.asyncio
async def test_a_program_that_lacks_the_steps_to_go_on_with_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise steps that it skipped as done would never be done, and the program would end without an error."""
    monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", Inline)

    async def run(kinds: tuple[str, ...], *, dies: bool) -> list[Any]:
        async def main(comm: Any) -> Any:
            samplers = {kind: ElasticSampler(12, 4, name=kind) for kind in ("train", "val")}
            try:
                async with Elastic(comm, State(), checkpoint=tmp_path / "c.npz", checkpoint_every=1) as elastic:
                    for kind in kinds:
                        async for _ in elastic.steps(samplers[kind]):
                            await comm.barrier()
                            if dies and kind == "val":
                                raise Died
            except (Died, ConfigError) as error:
                return str(error)
            return "ended"

        async with world(2, elastic=True) as comms:
            return await run_ranks(comms, main)

    assert await run(("train", "val"), dies=True) == ["", ""]
    told = await run(("train",), dies=False)
    assert all("ended before it reached the steps to resume: through sampler 'val'" in one for one in told)
    assert await run((), dies=False) == await run(("train", "val"), dies=False) == ["ended"] * 2


def test_names_are_each_ones_own() -> None:
    for name in ("", 3, "a\nb"):
        with pytest.raises(ConfigError, match="name of a sampler"):
            ElasticSampler(3, 1, name=name)  # type: ignore[arg-type]
    with sync_world(1, elastic=True) as comms, Elastic(comms[0], State()) as elastic:
        one, other = ElasticSampler(3, 1, name="a"), ElasticSampler(3, 1, name="a")
        assert len(list(elastic.steps(one))) == len(list(elastic.steps(other))) == 3
        with pytest.raises(ConfigError, match="two samplers have the name 'a'"):
            next(elastic.steps(one))
        for wrong in ({"passes": 1.5}, {"used_in": 3}, {"used_in": [3]}):
            with pytest.raises(ConfigError, match=r"is a number of passes|is the name of a call"):
                next(elastic.steps(other, **wrong))


@pytest.mark.parametrize(
    ("walk", "options", "words"),
    [
        ({"passes": 3}, {}, r"this rank begins steps through .*passes=3.* go through sampler 0, passes=2"),
        (
            {"passes": 2, "used_in": "other"},
            {},
            r"used_in of this rank's steps is \['other'\], that of the others \['used'\]",
        ),
        ({"sampler": ElasticSampler(41, 4)}, {}, "sampler 0 does not fit the place of the job: length"),
        (
            {},
            {"on_loss": "raise"},
            "on_loss of an Elastic is the same on all ranks: it is 'finish' on rank 0 and 'raise'",
        ),
        ({}, {"own": State(n=1)}, "own of an Elastic is the same on all ranks"),
    ],
)
@pytest.mark.asyncio
async def test_joining_rank_with_other_arguments_alone_is_refused_and_the_others_continue(
    walk: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    async with world(2, elastic=True) as comms:
        is_asked = asyncio.Event()

        async def main(comm: Any, more: dict[str, Any], **options: Any) -> Any:
            state, sizes = State(used=np.zeros(40)), set()
            given = {"sampler": ElasticSampler(40, 2), "passes": 2, "used_in": "used"} | more
            async with Elastic(comm, state, **options) as elastic:
                async for step in elastic.steps(**given):
                    mask = np.zeros(40)
                    mask[step.indices] = 1
                    state.used += await comm.all_reduce(mask, name="used")
                    is_asked.set()
                    sizes.add(comm.size)
            return set(state.used.tolist()), sizes

        async def newcomer() -> None:
            await is_asked.wait()
            comm = await comms.join(2)
            with pytest.raises(ConfigError, match=words):
                await main(comm, walk, **options)
            comms.kill(2)

        comer = asyncio.create_task(newcomer())
        found = await run_ranks(comms, lambda comm: main(comm, {}))
        await comer
        assert [used for used, _ in found] == [{2.0}] * 2


@pytest.mark.asyncio
async def test_a_checkpoint_of_before_samplers_had_places_is_gone_on_from(tmp_path: Path) -> None:
    from kfcomm.collectives.objects import packed

    sampler, used = ElasticSampler(12, 4), np.zeros(12)
    used[sampler.take()] = 1
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as file:
        about = [1, [["used", [12], "float64"]], {"used": None}, [7, sampler.state_dict()]]
        file.writestr("kfcomm", packed(about).tobytes())
        with file.open("used.npy", "w") as entry:
            np.lib.format.write_array(entry, used)
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state, numbers = State(used=np.zeros(12)), []
            async with Elastic(comm, state, checkpoint=tmp_path / "c.npz", checkpoint_every=1) as elastic:
                async for step in elastic.steps(ElasticSampler(12, 4, name="train"), passes=2):
                    mask = np.zeros(12)
                    mask[step.indices] = 1
                    state.used += await comm.all_reduce(mask, name="used")
                    numbers.append(step.number)
            return numbers, set(state.used.tolist())

        assert await run_ranks(comms, main) == [([6, 7, 8, 9, 10], {2.0})] * 2
