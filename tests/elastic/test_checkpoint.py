"""Resuming from a checkpoint after the loss of all ranks; a damaged file is an error on all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.checkpoint import Checkpoint
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world


async def train(path: Path, size: int, last: int | None = None, every: int = 3) -> list[Any]:
    """Train for two passes, or until all ranks die after step ``last``; what each saw."""

    async def main(comm: Any) -> Any:
        seen = []
        state = State(used=np.zeros(20), steps=0)
        async with Elastic(comm, state, checkpoint=path, checkpoint_every=every) as elastic:
            async for step in elastic.steps(ElasticSampler(20, 4), passes=2):
                seen.append((step.number, step.batch.tolist()))
                mask = np.zeros(20)
                mask[step.indices] = 1
                state.used += await comm.all_reduce(mask, "used")
                state.steps += 1
                if step.number == last:
                    return seen
        return seen, state.used.tolist(), state.steps

    async with world(size, elastic=True) as comms:
        return await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    whole = (await train(tmp_path / "other.npz", 2))[0]
    await train(path, 3, last=7)
    assert sorted(os.listdir(tmp_path)) == ["other.npz", "train.npz"]
    with np.load(path) as file:
        assert file["used"].shape == (20,)
    first, second = await train(path, 2)
    assert first == second
    begun = first[0][0][0]
    assert 1 <= begun <= 7
    # as if nothing had happened: the same batches from there on, and each sample once in each pass
    assert first[0] == whole[0][begun:]
    assert first[1:] == whole[1:] == ([2.0] * 20, 10)


@pytest.mark.asyncio
async def test_damaged_checkpoint_raises_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    await train(path, 1)
    good = path.read_bytes()
    at = good.index(b"\x93NUMPY") + 200
    for data, text in (
        (b"", "is not a readable checkpoint: File is not a zip file"),
        (good[: len(good) // 2], "is not a readable checkpoint"),
        (good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :], "is not a readable checkpoint: Bad CRC"),
    ):
        path.write_bytes(data)

        async def main(comm: Any) -> None:
            with pytest.raises(ConfigError, match=text):  # noqa: B023
                async with Elastic(comm, State(used=np.zeros(20), steps=0), checkpoint=path):
                    raise AssertionError

        async with world(2, elastic=True) as comms:
            await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_checkpoint_of_another_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.npz"
    written = Checkpoint(path, 1, State(a=np.arange(3.0)))
    written.look(1, None)
    await written.close()
    for state, text in (
        (State(a=np.zeros(4)), r"does not fit: a is float64\(4,\) here and float64\(3,\) on the checkpoint"),
        (State(b=np.zeros(3)), "does not fit: this rank's state has b where that of the checkpoint has a"),
    ):
        with pytest.raises(ConfigError, match=text):
            await Checkpoint(path, 1, state).read()
    monkeypatch.setattr("kfcomm.elastic.checkpoint.FORM", 4)
    with pytest.raises(ConfigError, match="of another version of kfcomm"):
        await Checkpoint(path, 1, State(a=np.zeros(3))).read()
    with pytest.raises(ConfigError, match="does not exist: create it first"):
        Checkpoint(tmp_path / "no" / "c.npz", 1, State())
    for every in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="checkpoint_every is a number of steps"):
            Checkpoint(path, every, State())  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    import ml_dtypes

    def state(scale: int) -> State:
        return State(
            file=np.arange(6).reshape(2, 3) * scale, half=np.arange(4).astype(ml_dtypes.bfloat16) * scale,
            none=np.zeros((0, 2)), tree={"a": [np.full(2, 1j * scale)], "n": scale, "t": f"{scale}"}, few=[scale],
        )  # fmt: skip

    path = tmp_path / "c.npz"
    for every in (1, 2):
        checkpoint = Checkpoint(path, every, state(every))
        assert every == 1 or await checkpoint.read() == "place"
        checkpoint._state.few.append(0)
        checkpoint.look(0, "early")
        checkpoint.look(1, "place")
        await checkpoint.close()
    found = state(7)
    assert await Checkpoint(path, 1, found).read() == "place"
    assert (found.file == state(1).file).all()
    assert (found.half == state(1).half).all()
    assert found.tree["a"][0].tolist() == [1j, 1j]
    assert (found.tree["n"], found.tree["t"], found.few) == (1, "1", [1, 0, 0])


@pytest.mark.asyncio
async def test_a_full_disk_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, state = tmp_path / "c.npz", State(a=np.zeros(3))
    checkpoint = Checkpoint(path, 1, state)
    checkpoint.look(1, "first")
    checkpoint._thread.submit(lambda: None).result()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    state.a += 1
    checkpoint.look(2, "second")
    await checkpoint.close()
    assert "No space left on device; training goes on" in caplog.text
    assert os.listdir(tmp_path) == ["c.npz"]
    assert await Checkpoint(path, 1, state).read() == "first"
    assert state.a.tolist() == [0, 0, 0]


@pytest.mark.asyncio
async def test_one_at_a_time(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "c.npz", 2, State(n=0))
    gate = threading.Event()
    checkpoint._thread.submit(gate.wait)
    for number in range(1, 6):
        checkpoint.look(number, number)
    gate.set()
    assert checkpoint._written is not None
    checkpoint._written.result()
    checkpoint.look(2, 2)
    checkpoint.look(3, 3)
    await checkpoint.close()
    assert await Checkpoint(tmp_path / "c.npz", 1, State(n=0)).read() == 3


@pytest.mark.asyncio
async def test_written_checkpoint_equals_the_copy(tmp_path: Path) -> None:
    """Training changes the state, and its shapes, while it is written; a file that a killed rank has left goes."""
    state = State(weights=np.arange(6.0).reshape(2, 3), step=1)
    for left in (".c.npz.123", ".c.npz.00ff.0.00ff"):
        (tmp_path / left).write_bytes(b"half")
    (tmp_path / ".c.npz.of another").write_bytes(b"theirs")
    checkpoint = Checkpoint(tmp_path / "c.npz", 1, state)
    gate = threading.Event()
    checkpoint._thread.submit(gate.wait)
    checkpoint.look(1, "here")
    state.weights, state.step = np.zeros(7), 2
    gate.set()
    await checkpoint.close()
    with np.load(tmp_path / "c.npz") as file:
        np.testing.assert_array_equal(file["weights"], np.arange(6.0).reshape(2, 3))
    other = State(weights=np.zeros((2, 3)), step=0)
    assert await Checkpoint(tmp_path / "c.npz", 1, other).read() == "here"
    assert other.step == 1
    assert other.weights[1, 2] == 5.0
    assert sorted(os.listdir(tmp_path)) == [".c.npz.of another", "c.npz"]
