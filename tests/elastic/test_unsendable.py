"""Unsendable values in a state are refused on assignment, or on all ranks at the next boundary; never later."""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.checks import MAX_DEPTH
from kfcomm.elastic.state import plan_of, small_of
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world


class Color(enum.StrEnum):
    RED = "red"


class Text(str):
    """Each equals itself alone."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 7


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


def endless() -> Any:
    found: list[Any] = []
    found.append(found)
    return found


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "tuple key": (lambda: {(1, 2): 0.5}, r"has the key \(1, 2\), a tuple"),
    "set key": (lambda: {frozenset({1}): 0.5}, "a frozenset"),
    "numpy key": (lambda: {np.int64(1): 0.5}, "a int64"),
    "nan key": (lambda: {float("nan"): 0.5}, "has the key nan"),
    "large key": (lambda: {1 << 64: 0.5}, "more than 64 bits"),
    "key with a surrogate": (lambda: {"\ud800": 0.5}, "msgpack cannot carry"),
    "equal keys": (lambda: {Text("a"): 1, Text("a"): 2}, "two of its keys are equal"),
    "set": (lambda: {1, 2}, "a set: give sorted"),
    "object": (object, "an object"),
    "complex": (lambda: 1j, "a complex"),
    "large number": (lambda: 1 << 64, "more than 64 bits"),
    "object array": (lambda: np.array([None]), "dtype object is not supported"),
    "text array": (lambda: np.array(["a"]), "dtype <U1 is not supported"),
    "dates": (lambda: np.zeros(2, "M8[s]"), "dtype datetime64"),
    "records": (lambda: np.zeros(2, [("a", int)]), "is not supported"),
    "long doubles": (lambda: np.zeros(2, np.longdouble), "dtype float128 is not supported"),
    "masked": (lambda: np.ma.masked_array([1.0]), "would lose its mask"),
    "deep": (lambda: nested(MAX_DEPTH + 1), "nested more than"),
    "endless": (endless, "holds itself"),
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_it_is_refused_where_it_is_assigned_with_its_path(what: str) -> None:
    make, words = UNSENDABLE[what]
    state = State(best={"it": 1})
    for put in (lambda: State(best={"it": make()}), lambda: setattr(state, "best", {"it": make()})):
        with pytest.raises(ConfigError, match=rf"^best\['it'\].* cannot be in a state: .*{words}"):
            put()
    assert state.best == {"it": 1}


@pytest.mark.parametrize("what", UNSENDABLE)
@pytest.mark.asyncio
async def test_unsendable_value_added_later_raises_everywhere_by_the_end_of_the_next_step(what: str) -> None:
    make, words = UNSENDABLE[what]
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> int:
            state, steps = State(best={}), 0
            try:
                async with Elastic(comm, state) as elastic:
                    async for step in elastic.steps(ElasticSampler(20, 2)):
                        steps += 1
                        if step.number == 3 and comm.rank == 1:
                            state.best["it"] = make()
            except ConfigError as error:
                is_told = re.match(rf"rank 1: best\['it'\].* cannot be in a state: .*{words}", str(error))
                return steps if is_told else -1
            return -2

        assert await run_ranks(comms, main) == [5, 5, 5]


@pytest.mark.parametrize("what", ["tuple key", "object array", "endless", "equal keys"])
@pytest.mark.asyncio
async def test_own_that_cannot_be_sent_is_told_to_all_by_commit(what: str) -> None:
    make, words = UNSENDABLE[what]
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> bool:
            own = State(mine={})
            async with Elastic(comm, State(), own=own) as elastic:
                if comm.rank == 2:
                    own.mine["it"] = make()
                with pytest.raises(ConfigError, match=rf"^rank 2: mine\['it'\].* cannot be in a state: .*{words}"):
                    await elastic.commit()
                own.mine.clear()
                return await elastic.commit()

        assert await run_ranks(comms, main) == [True] * 3


@pytest.mark.asyncio
async def test_sendable_state_reaches_joining_ranks(tmp_path: Path) -> None:
    """Keys of subclasses become plain; arrays and values under similar keys stay separate."""

    import ml_dtypes

    def made(fill: int) -> State:
        tree = {
            "a/b": np.full(1, fill), "a": {"b": np.full(2, fill)}, 1: np.full(3, fill), "1": np.full(4, fill), b"1": 1,
            1.5: 2, None: 3, True and "t": [np.full(2, fill, ml_dtypes.bfloat16)], Color.RED: np.full(5, fill),
        }  # fmt: skip
        return State(tree=tree, deep=nested(MAX_DEPTH), few={Color.RED: fill}, count=fill)

    assert len({place for place, *_ in plan_of(made(1))}) == 6
    async with world(2, elastic=True) as comms:
        is_asked = asyncio.Event()

        async def main(comm: Any, fill: int) -> Any:
            state = made(fill)
            async with Elastic(comm, state, checkpoint=tmp_path / "c.npz", checkpoint_every=1) as elastic:
                async for _ in elastic.steps(ElasticSampler(40, 1)):
                    state.tree["new"] = {"lr": fill if fill != 9 else state.tree["new"]["lr"]}
                    is_asked.set()
                    if comm.size == 3:
                        break
            return [array.tolist() for array in (state.tree["1"], state.tree["red"])], small_of(state)

        async def newcomer() -> Any:
            await is_asked.wait()
            return await main(await comms.join(2), 9)

        comer = asyncio.create_task(newcomer())
        first, second = await run_ranks(comms, lambda comm: main(comm, 1))
        newest = await comer
        assert newest == first == second
        assert newest[0] == [[1] * 4, [1] * 5]
        assert newest[1]["tree"]["new"] == {"lr": 1}


@pytest.mark.asyncio
async def test_a_state_that_cannot_be_read_when_it_is_kept_is_told_at_the_next_boundary(tmp_path: Path) -> None:
    class Gone:
        is_there = True

        def __array__(self, *_: Any) -> Any:
            if not self.is_there:
                raise RuntimeError("Array has been deleted")
            return np.zeros(2)

    async with world(2, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> Any:
            gone = Gone()
            try:
                async with Elastic(comm, State(x=gone), checkpoint=tmp_path / "c.npz", checkpoint_every=2) as elastic:
                    async for step in elastic.steps(ElasticSampler(20, 2), passes=1 << 30):
                        gone.is_there = step.number < 1
            except ConfigError as error:
                return str(error)

        assert await run_ranks(comms, main) == ["rank 0: the state cannot be read: Array has been deleted"] * 2
