"""K-FAC along training: averages, kept inverses and messages, beside the formulas in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm import Communicator
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import KFAC, Layer

SHAPES = {"one": (4, 3), "two": (2, 5), "three": (6, 6)}
DAMPING = {"t*": 0.3, "one": 0.1}


def layers(step: int, rank: int) -> dict[str, Layer]:
    """Gradients are the same on all ranks, covariances a rank's own."""
    shared, mine = np.random.default_rng(step), np.random.default_rng((step, rank))
    made = {}
    for name, shape in SHAPES.items():
        gradient = shared.standard_normal(shape)
        outer, inner = (mine.standard_normal((8, count)) for count in shape)
        made[name] = Layer(gradient, outer.T @ outer / 8, inner.T @ inner / 8)
    return made


def expected(
    steps: int, size: int, *, decay: float, covariances: int, inverses: int, kl_clip: float | None = None, lr: float = 1
) -> list[dict[str, Any]]:
    """The formulas, step by step, with the weights of all former values written out."""
    history: list[list[dict[str, Layer]]] = []
    found, kept = [], dict[str, Any]()
    for step in range(steps):
        ranks = [layers(step, rank) for rank in range(size)]
        if step % covariances == 0:
            history.append(ranks)
        weights = np.array([decay ** (len(history) - 1 - one) for one in range(len(history))])
        weights /= weights.sum()
        if step % inverses == 0:
            for name, (rows, columns) in SHAPES.items():
                damping = 0.1 if name == "one" else 0.3
                outer = sum(
                    w * sum(one[name].outer for one in of) / size for w, of in zip(weights, history, strict=True)
                )
                inner = sum(
                    w * sum(one[name].inner for one in of) / size for w, of in zip(weights, history, strict=True)
                )
                kept[name] = (
                    np.linalg.inv(outer + damping * np.eye(rows)), np.linalg.inv(inner + damping * np.eye(columns))
                )  # fmt: skip
        made = {name: kept[name][0] @ one.gradient @ kept[name][1] for name, one in ranks[0].items()}
        if kl_clip is not None:
            total = lr**2 * sum((made[name] * ranks[0][name].gradient).sum() for name in made)
            made = {name: min(1.0, (kl_clip / total) ** 0.5) * one for name, one in made.items()}
        found.append(made)
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kl_clip", [None, 0.001])
async def test_steps_are_those_of_one_process(size: int, kl_clip: float | None) -> None:
    async def main(comm: Communicator) -> list[dict[str, Any]]:
        kfac = KFAC(comm, DAMPING, decay=0.8, covariances_every=2, inverses_every=4, kl_clip=kl_clip)
        found = []
        for step in range(9):
            given = layers(step, comm.rank)
            if not kfac.wants_covariances:
                given = {name: one._replace(outer=None, inner=None) for name, one in given.items()}
            found.append(await kfac.precondition(given, lr=0.5))
        return found

    async with world(size) as comms:
        ranks = await run_ranks(comms, main)
    truth = expected(9, size, decay=0.8, covariances=2, inverses=4, kl_clip=kl_clip, lr=0.5)
    for found in ranks:
        for one, wanted in zip(found, truth, strict=True):
            for name, array in wanted.items():
                np.testing.assert_allclose(one[name], array, rtol=1e-12, atol=1e-12)
        assert all(np.array_equal(found[-1][name], ranks[0][-1][name]) for name in SHAPES)


def test_steps_between_renewals_send_nothing() -> None:
    def main(comm: Any) -> list[int]:
        kfac, counts = KFAC(comm, 0.1, covariances_every=2, inverses_every=4), []
        for step in range(8):
            kfac.precondition(layers(step, comm.rank)).wait()
            counts.append(sum(one.count for one in comm.statistics().keys))
        return np.diff([0, *counts]).tolist()

    with sync_world(2) as comms:
        counts = run_threads(comms, main)[0]
    assert counts[1::2] == [0, 0, 0, 0]
    assert counts[0] == counts[4] > counts[2] == counts[6] > 0


@pytest.mark.asyncio
async def test_state_continues_with_another_number_of_ranks() -> None:
    async def part(comm: Communicator, steps: range, state: Any) -> tuple[dict[str, Any], Any]:
        kfac = KFAC(comm, DAMPING, decay=0.8, covariances_every=2, inverses_every=4)
        if state is not None:
            kfac.load_state_dict(state)
        for step in steps:
            # covariances of rank 0 everywhere: the mean does not depend on the number of ranks
            found = await kfac.precondition(layers(step, 0))
        return found, kfac.state_dict()

    async with world(3) as comms:
        whole, _ = (await run_ranks(comms, lambda comm: part(comm, range(11), None)))[0]
    async with world(2) as comms:
        _, state = (await run_ranks(comms, lambda comm: part(comm, range(5), None)))[0]
    async with world(3) as comms:
        for found, _ in await run_ranks(comms, lambda comm: part(comm, range(5, 11), state)):
            for name in SHAPES:
                np.testing.assert_allclose(found[name], whole[name], rtol=1e-12)


@pytest.mark.asyncio
async def test_covariances_that_are_not_finite_are_left_out() -> None:
    async def main(comm: Communicator) -> list[dict[str, Any]]:
        kfac = KFAC(comm, 0.1, covariances_every=1, inverses_every=1)
        found = []
        for step in range(4):
            given = layers(step, comm.rank)
            if step in (0, 2) and comm.rank == 1:
                given["two"].outer[0, 0] = np.nan
            found.append(await kfac.precondition(given))
        return found

    async with world(2) as comms:
        for found in await run_ranks(comms, main):
            assert all(np.array_equal(found[0][name], one.gradient) for name, one in layers(0, 0).items())
            assert all(np.isfinite(array).all() for one in found for array in one.values())
            assert not np.allclose(found[1]["two"], layers(1, 0)["two"].gradient)


@pytest.mark.asyncio
async def test_bad_arguments() -> None:
    async with world(1) as comms:
        for options, said in (
            ({"damping": 0}, "damping is above 0, not 0"),
            ({"damping": {"*": -1}}, "damping is above 0, not -1"),
            ({"decay": 1}, "below 1, not 1"),
            ({"covariances_every": 0}, "covariances_every is a whole number"),
            ({"covariances_every": 4, "inverses_every": 6}, "a multiple of covariances_every, 4, not 6"),
            ({"kl_clip": 0}, "kl_clip is above 0, not 0"),
        ):
            with pytest.raises(ConfigError, match=said):
                KFAC(comms[0], **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="no damping is given for layer 'two': there are one"):
            await KFAC(comms[0], {"one": 0.1}).precondition(layers(0, 0))
        with pytest.raises(ConfigError, match="step 0 takes the covariances of layer 'one'"):
            await KFAC(comms[0]).precondition({"one": Layer(np.ones((2, 2)), None, None)})
