"""Elastic states of torch and JAX: in joining ranks, in steps that are repeated, and in heirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.elastic.joining import Handover
from kfcomm.elastic.snapshots import Kept
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world

torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy


@pytest.fixture(scope="module", autouse=True)
def optimizers_met() -> None:
    """The first optimizer makes a temporary folder that stays: no test is to be blamed for it."""
    trained(0)


class Died(Exception):
    """This rank was killed: it does nothing more."""


class Moments(NamedTuple):
    """As optax has them."""

    count: Any
    mu: dict[str, Any]


class Nothing(NamedTuple):
    """As optax has it where there is nothing to keep."""


def trained(seed: int) -> tuple[Any, Any]:
    """A module and its optimizer after one step."""
    torch.manual_seed(seed)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 9, 2, dtype=torch.bfloat16).float(),
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01 * (seed + 1), betas=(0.8, 0.9 + seed / 100))
    module(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    return module, optimizer


async def hand_over(comms: Any, states: list[State]) -> None:
    """The first two ranks have a state, and give it to the others."""

    async def main(comm: Any) -> Any:
        return await Handover(comm, comm.begin(), states[comm.rank], "", {}).carry_out([0], (0, 1))

    assert await run_ranks(comms, main) == [[0]] * 3


@pytest.mark.asyncio
async def test_joining_rank_gets_the_module_and_optimizer_of_the_others() -> None:
    async with world(3, elastic=True) as comms:
        made = [trained(0), trained(0), trained(1)]
        states = [State(module=module.state_dict(), optimizer=optimizer.state_dict()) for module, optimizer in made]
        module, optimizer = made[2]
        places = [one.data_ptr() for one in module.parameters()]
        await hand_over(comms, states)
        assert [one.data_ptr() for one in module.parameters()] == places
        for one, other in zip(module.state_dict().values(), made[0][0].state_dict().values(), strict=True):
            assert torch.equal(one, other)
        optimizer.load_state_dict(states[2].optimizer)
        group, right = optimizer.param_groups[0], made[0][1].param_groups[0]
        assert (group["lr"], group["betas"]) == (right["lr"], right["betas"]) == (0.01, (0.8, 0.9))
        for parameter, like in zip(module.parameters(), made[0][0].parameters(), strict=True):
            mine, theirs = optimizer.state[parameter], made[0][1].state[like]
            assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def check_same(module: Any, optimizer: Any, like: Any, like_optimizer: Any) -> None:
    """Check that a module and its optimizer continue as others: same bits after one more step of both."""
    for one in (optimizer, like_optimizer):
        for parameter in one.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        one.step()
    for mine, theirs in zip(module.state_dict().values(), like.state_dict().values(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    group, right = optimizer.param_groups[0], like_optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (right["lr"], right["betas"])
    assert isinstance(group["betas"], tuple)


@pytest.mark.asyncio
async def test_module_and_optimizer_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    module, optimizer = trained(0)
    checkpoint = Checkpoint(tmp_path / "c.npz", 1, State(module=module, optimizer=optimizer))
    checkpoint.look(1, "place")
    await checkpoint.close()
    other = trained(1)[0]
    fresh = torch.optim.Adam(other.parameters())
    again = Checkpoint(tmp_path / "c.npz", 1, State(module=other, optimizer=fresh))
    assert await again.read() == "place"
    await again.close()
    check_same(other, fresh, module, optimizer)


class Tree:
    """Object with a tree of JAX."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> Any:
        return {"tree": self.tree}

    def load_state_dict(self, state: Any) -> None:
        self.tree = state["tree"]


@pytest.mark.asyncio
async def test_object_with_a_tree_gets_arrays_and_tuples_of_their_kinds() -> None:
    async with world(3, elastic=True) as comms:
        trees = [Tree(tree(value)) for value in (2.0, 2.0, 5.0)]
        await hand_over(comms, [State(tree=one) for one in trees])
        mine = trees[2].tree
        assert isinstance(mine[0], Moments)
        assert isinstance(mine[0].mu["w"], jax.Array)
        assert mine[0].mu["b"][0].dtype == jnp.bfloat16
        assert jax.tree.all(jax.tree.map(lambda one, other: (one == other).all(), mine, trees[0].tree))


@pytest.mark.asyncio
async def test_parameters_themselves_can_be_in_a_state() -> None:
    async with world(3, elastic=True) as comms:
        parameters = [torch.nn.Parameter(torch.full((2, 3), float(comm.rank // 2))) for comm in comms]
        await hand_over(comms, [State(w=one) for one in parameters])
        assert parameters[2].requires_grad
        assert torch.equal(parameters[2].detach(), torch.zeros(2, 3))


def tree(value: float) -> Any:
    """Of every kind of node that JAX has by itself."""
    weights = {"w": jnp.full((2, 3), value), "b": [jnp.full(4, value, jnp.bfloat16), None]}
    return (Moments(jnp.asarray(int(value)), weights), Nothing(), {"key": jnp.full(2, int(value), jnp.uint32)})


@pytest.mark.asyncio
async def test_joining_rank_gets_the_tree_of_the_others() -> None:
    async with world(3, elastic=True) as comms:
        states = [State(tree=tree(value), lr=value) for value in (2.0, 2.0, 5.0)]
        before = states[2].tree[0].mu["w"]
        await hand_over(comms, states)
        mine: Any = states[2].tree
        assert isinstance(mine[0], Moments)
        assert mine[1] == Nothing()
        assert int(mine[0].count) == 2
        for one, kind in (
            (mine[0].mu["w"], jnp.float32),
            (mine[0].mu["b"][0], jnp.bfloat16),
            (mine[2]["key"], jnp.uint32),
        ):
            assert isinstance(one, jnp.ndarray)
            assert one.dtype == kind
            assert (one == 2).all()
        assert mine[0].mu["b"][1] is None
        assert states[2].lr == 2.0
        assert (before == 5).all()  # what the program still holds is as it was


@pytest.mark.asyncio
async def test_unlike_modules_are_told_by_the_names_of_their_parameters() -> None:
    async with world(2, elastic=True) as comms:
        states = [State(module=torch.nn.Linear(3, 2 + comm.rank).state_dict()) for comm in comms]

        async def main(comm: Any) -> None:
            with pytest.raises(
                ConfigError, match=r"module\['bias'\] is float32\(\d,\) here and float32\(\d,\) on rank"
            ):
                async with Elastic(comm, states[comm.rank]):
                    raise AssertionError

        await run_ranks(comms, main)


def test_a_step_that_runs_again_begins_with_the_same() -> None:
    module, _ = trained(0)
    state = State(module=module.state_dict(), tree=tree(1.0))
    right = [one.detach().clone() for one in module.parameters()]
    kept = Kept(state)
    kept.keep(None)
    with torch.no_grad():
        for one in module.parameters():
            one += 1
    state.tree = tree(3.0)
    kept.restore()
    assert all(torch.equal(one, other) for one, other in zip(module.parameters(), right, strict=True))
    assert (state.tree[0].mu["w"] == 1).all()


@pytest.mark.asyncio
async def test_heirs_get_what_was_a_ranks_own() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            me = comm.rank
            own = State(m=torch.full((me + 1,), float(me), dtype=torch.bfloat16), tree=tree(float(me)))
            try:
                async with Elastic(comm, State(), own=own) as elastic:
                    async for step in elastic.steps(ElasticSampler(8, 2)):
                        if step.number == 0:
                            assert await elastic.commit()
                            own.m += 5
                            own.tree = tree(9.0)
                            elastic.restore()
                            assert (own.m == me).all()
                            assert (own.tree[0].mu["w"] == me).all()
                        if step.number == 1 and me == 1:
                            comms.kill(1)
                            raise Died
                        await comm.barrier()
                    return elastic.inherited
            except Died:
                return None

        found, dead = await run_ranks(comms, main)
        assert dead is None
        assert found[1]["m"].astype(np.float32).tolist() == [1.0, 1.0]
        assert found[1]["tree"][0][1]["w"].tolist() == [[1.0] * 3] * 2
