"""Objects in a state: read when needed, handed over in the form of the others, restored, and saved."""

from __future__ import annotations

import asyncio
import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.joining import Handover
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world
from tests.elastic.support import Died

FORM_2 = (
    "c-jl_W@Zs#0D<=0>e$lV3qG#}vO$;)h_lm@^K)}2GaV5KFPgCH3HJgyXDd#nV=fx;N2br1G<i))QEF<mdZK!4v_b4drsZil`H3aQ"
    "Mw1toPh^I0%uFUtS)7xfzA$eINbSP%NsDuGa~9^bEG$0&7HL|TIO)J7#)TD23KBDmCY`o_0Co(+L?)27iIWzlGA_(xnZnw*(4cWy"
    "PHJ9yNe0J(iHi~w87D3@V3>6NW%p|j??Yw!=XX8-DKzgukZ}OeL%I+%7!(<d92cMZ4+R1YA`Hk5*2^oXWMmLv=zyw*(Ubi`eFGvH"
    "8Oj){)l*W7lZ(`?6x40fOw@H0)YI~dN{SNm;`57AQbFQwi8;loK=I;?#DY{HU&Ba8Q%9jzfdatA!0^BUgi(E>qWDl7<`Y(+Ps(A="
    "p8-`e1Hbbvh;qI$HJpzOKG;JUK<_Xzi7?|%YcSBj$N*1yAU(RwsL|O0jVb{YJr{u_dgP+(1_j{^Xh^Z5=$;L<vmBy@73>yfAY2Nh"
    "vzS0U0FU&`lK"
)
"""Checkpoint of an earlier version, compressed: lists have the place of tuples."""


class Holder:
    """Object with any state; counts how often it is read and loaded."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.num_read = self.num_loaded = 0

    def state_dict(self) -> Any:
        self.num_read += 1
        return self.tree

    def load_state_dict(self, tree: Any) -> None:
        self.num_loaded += 1
        self.tree = tree


def adam(step: int) -> dict[Any, Any]:
    """As an optimizer has it: keys are numbers, and some values are tuples."""
    moments = {0: {"step": np.array(step, np.float32), "m": np.full(3, float(step))}, 10: {"m": np.ones((2, 2))}}
    groups = [{"lr": 0.1 / step, "betas": (0.9, 0.99 / step), "params": [0, 10], "foreach": None}]
    return {"state": moments, "param_groups": groups}


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, in the kinds of their containers and keys as well."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return set(map(repr, one)) == set(map(repr, other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


async def hand_over(comms: Any, states: list[State], having: tuple[int, ...] | None) -> None:
    async def main(comm: Any) -> None:
        await Handover(comm, comm.begin(), states[comm.rank], "", {}).carry_out(None, having)

    await run_ranks(comms, main)


@pytest.mark.parametrize("having", [(0, 1), None], ids=["joining", "beginning"])
@pytest.mark.asyncio
async def test_joining_rank_gets_the_form_of_the_others(having: Any) -> None:
    async with world(3, elastic=True) as comms:
        holders = [Holder(adam(3)), Holder(adam(3)), Holder({"state": {}, "param_groups": [{"lr": 1.0}]})]
        holders[0].tree["more"] = holders[1].tree["more"] = {"x": np.arange(2, dtype=np.int32)}
        await hand_over(comms, [State(a=np.ones(1), opt=one, z=(1, 2)) for one in holders], having)
        assert same(holders[2].tree, holders[0].tree)
        assert holders[0].num_loaded == 0
        holders[2].tree["state"][0]["m"] += 1  # memory of its own, and writeable
        assert holders[0].tree["state"][0]["m"].tolist() == [3.0] * 3


@pytest.mark.asyncio
async def test_tuples_of_plain_values_stay_tuples_where_a_rank_has_none() -> None:
    async with world(2, elastic=True) as comms:
        states = [State(log=[(1, (2, "b"))], few={3: (1,)}), State(log=[], few={})]
        await hand_over(comms, states, (0,))
        assert same(states[1].log, [(1, (2, "b"))])
        assert same(states[1].few, {3: (1,)})


@pytest.mark.asyncio
async def test_numbers_of_numpy_become_those_of_python() -> None:
    async with world(2, elastic=True) as comms:
        numbers = {"lr": np.float64(0.1), "n": np.int64(3), "half": np.float32(0.5), "on": np.bool_(True)}
        holders = [Holder(numbers), Holder({})]
        await hand_over(comms, [State(one=holder) for holder in holders], (0,))
        assert same(holders[1].tree, {"lr": 0.1, "n": 3, "half": 0.5, "on": True})


@pytest.mark.asyncio
async def test_other_objects_are_refused_by_name() -> None:
    async with world(2, elastic=True) as comms:
        for mine, theirs, text in (
            (State(a=Holder({})), State(b=Holder({})), r"this rank's has a \(an object\), that of rank 1 b \(an obj"),
            (State(a=Holder({})), State(a=3), r"this rank's has a \(an object\), that of rank 1 a$"),
            (State(a=PerRank(1.0, "mean")), State(a=1.0), r"a \(mean of ranks\), that of rank 1 a$"),
        ):

            async def main(comm: Any) -> None:
                elastic = Elastic(comm, (mine, theirs)[comm.rank])  # noqa: B023
                with pytest.raises(ConfigError, match="the states of the ranks differ") as caught:
                    async with elastic:
                        raise AssertionError
                if comm.rank == 0:
                    assert caught.match(text)  # noqa: B023

            await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_owners_whose_objects_differ_in_form_raise_on_all_ranks() -> None:
    async with world(3, elastic=True) as comms:
        states = [State(o=Holder({"x": np.zeros(2 + (comm.rank == 1))})) for comm in comms]

        async def main(comm: Any) -> None:
            handing = Handover(comm, comm.begin(), states[comm.rank], "", {})
            with pytest.raises(ConfigError, match=r"o\['x'\] is float64\(\d,\) here and float64\(\d,\) on rank"):
                await handing.carry_out(None, (0, 1))

        await run_ranks(comms, main)


class Broken(Holder):
    """Object whose state cannot be read after its first use."""

    def state_dict(self) -> Any:
        if self.num_read:
            raise RuntimeError("no weights today")
        return super().state_dict()


@pytest.mark.asyncio
async def test_unreadable_object_raises_on_all_ranks() -> None:
    async with world(2, elastic=True) as comms:
        states = [State(one=Holder({})), State(one=Broken({}))]

        async def main(comm: Any) -> None:
            with pytest.raises(ConfigError, match=r"rank 1: one.state_dict\(\) cannot be read: no weights today"):
                async with Elastic(comm, states[comm.rank]):
                    raise AssertionError

        await run_ranks(comms, main)


def test_unsendable_state_of_an_object_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"opt\['seen'\] cannot be in a state: .*sorted"):
        State(opt=Holder({"seen": {1, 2}}))
    broken = Broken({})
    broken.num_read = 1
    with pytest.raises(ConfigError, match=r"one.state_dict\(\) cannot be read: no weights"):
        State(one=broken)
    state = State(opt=Holder({}), x=1)
    for name, value in (("opt", 3), ("x", Holder({})), ("x", PerRank(1.0, "sum"))):
        with pytest.raises(ConfigError, match="stays of its kind"):
            setattr(state, name, value)
    state.opt = other = Holder({})
    assert state.opt is other
    with pytest.raises(ConfigError, match="one of mean, sum, not 'average'"):
        PerRank(1.0, "average")


@pytest.mark.asyncio
async def test_objects_are_not_read_at_boundaries() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> int:
            holder = Holder(adam(1))
            async with Elastic(comm, State(opt=holder)) as elastic:
                before = holder.num_read
                async for _ in elastic.steps(ElasticSampler(40, 2)):
                    await comm.barrier()
            return holder.num_read - before

        assert await run_ranks(comms, main) == [0, 0]


@pytest.mark.asyncio
async def test_repeated_step_begins_with_the_objects_of_its_beginning() -> None:
    begun = asyncio.Event()
    ranks: set[int] = set()
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            nonlocal ranks
            holder = Holder({"n": 0, "x": np.zeros(2), "pair": (1, {5: 2})})
            seen = []
            try:
                async with Elastic(comm, State(holder=holder), on_loss="restart_step") as elastic:
                    async for step in elastic.steps(ElasticSampler(12, 2)):
                        with step:
                            assert same(holder.tree["pair"], (1, {5: 2}))
                            seen.append((step.number, holder.tree["n"], holder.tree["x"].tolist()))
                            # the next state may be of another form
                            tree = {**holder.tree, "n": holder.tree["n"] + 1, f"new{step.number}": np.ones(1)}
                            holder.tree = tree
                            tree["x"] += 1
                            ranks |= {comm.rank} if step.number == 2 else set()
                            if len(ranks) == 3:
                                begun.set()
                            if comm.rank == 2 and step.number == 2:
                                await begun.wait()
                                comms.kill(2)
                                raise Died
                            await comm.all_reduce(np.ones(1), "x")
            except Died:
                return None
            return seen, sorted(holder.tree)

        *found, dead = await run_ranks(comms, main)
        assert dead is None
        assert found[0] == found[1]
        seen, keys = found[0]
        assert [one[1] for one in seen] == [0, 1, 2, 2, 3, 4, 5]
        assert all(x == [n, n] for _, n, x in seen)
        assert keys == ["n", *(f"new{number}" for number in (0, 1, 3, 4, 5, 6)), "pair", "x"]


@pytest.mark.asyncio
async def test_object_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    for step in (1, 2):
        checkpoint = Checkpoint(path, 1, State(opt=Holder(adam(step)), x=np.full(2, step), t=(step,)))
        assert step == 1 or await checkpoint.read() == "place"
        checkpoint.look(1, "place")
        await checkpoint.close()
    with np.load(path) as file:
        assert file["opt['state'][0]['m']"].tolist() == [1.0] * 3
    holder, state = Holder({}), State(opt=Holder({}), x=np.zeros(2, int), t=())
    state.opt = holder
    checkpoint = Checkpoint(path, 1, state)
    assert await checkpoint.read() == "place"
    await checkpoint.close()
    assert same(holder.tree, adam(1))
    assert (state.x.tolist(), state.t) == ([1, 1], (1,))
    refusing = Checkpoint(path, 1, State(opt={}, x=np.zeros(2, int), t=()))
    with pytest.raises(ConfigError, match="does not fit: its names"):
        await refusing.read()
    await refusing.close()


@pytest.mark.asyncio
async def test_heir_inherits_the_state_of_an_object() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            holder = Holder(adam(1 + comm.rank))
            try:
                async with Elastic(comm, State(), own=State(opt=holder, few=(comm.rank,))) as elastic:
                    async for step in elastic.steps(ElasticSampler(8, 2)):
                        if step.number == 0:
                            assert await elastic.commit()
                            holder.tree = {}
                            elastic.restore()
                            assert same(holder.tree, adam(1 + comm.rank))
                        if step.number == 1 and comm.rank == 1:
                            comms.kill(1)
                            raise Died
                        await comm.barrier()
                    return elastic.inherited
            except Died:
                return None

        found, _ = await run_ranks(comms, main)
        assert same(found, {1: {"few": (1,), "opt": adam(2)}})


@pytest.mark.asyncio
async def test_checkpoint_of_an_earlier_version_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    path.write_bytes(zlib.decompress(base64.b85decode(FORM_2)))
    tree = {"a": [np.zeros(2, np.float32), (0, "")], "pair": (0.0, [0])}
    state = State(w=np.zeros(3), tree=tree, log=[], n=0)
    checkpoint = Checkpoint(path, 1, state)
    assert await checkpoint.read() == [5, {"0": {"length": 8}}, None, ["aa"]]
    await checkpoint.close()
    assert (state.w.tolist(), state.log, state.n) == ([0, 1, 2], [["e", 1]], 4)
    assert same(state.tree, {"a": [np.full(2, 7, np.float32), (1, "x")], "pair": (0.5, [2])})


@pytest.mark.asyncio
@pytest.mark.parametrize("parts", [False, True])
async def test_one_dictionary_under_two_names_gets_both_contents(parts: bool) -> None:
    """An optimizer whose first state is the model itself: a rank that joins makes both anew, from one dictionary."""
    async with world(1, elastic=True) as comms:
        joined: list[Any] = []

        def made() -> State:
            params = {"w": np.zeros(3), "b": np.zeros(1)}
            return State(params=params, inner=(params, 0), lone=params["b"])

        async def main(comm: Any, state: State) -> None:
            async with Elastic(comm, state) as elastic:
                async for step in elastic.steps(ElasticSampler(64, 1)):
                    if step.number == 0 and parts:
                        state.inner, state.lone = ({"w": np.ones(3), "b": np.ones(1)}, 1), np.full(1, 2.0)
                    if step.number == 1 and comm.size == 1:
                        joined.append(asyncio.ensure_future(join()))
                    await comm.all_reduce(np.ones(1), name="x")
                    if comm.size == 2:
                        return

        async def join() -> None:
            newest.append(made())
            await main(await comms.join(7), newest[0])

        first, newest = made(), list[State]()
        await main(comms[0], first)
        await joined[0]
        for state in (first, newest[0]):
            assert state.params["w"].tolist() == [0, 0, 0]
            assert state.inner[0]["w"].tolist() == ([1, 1, 1] if parts else [0, 0, 0])
            assert state.inner[0]["b"].tolist() == ([1] if parts else [0])
            assert state.inner[1] == parts
            assert state.lone.tolist() == ([2] if parts else [0])
            state.params["b"] += 5
            assert (state.lone.tolist() == [5]) != parts
            assert (state.inner[0] is state.params) != parts
