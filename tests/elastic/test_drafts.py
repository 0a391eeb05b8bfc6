"""Several writers of one checkpoint: none removes what another one writes, or replaces what a later one has written."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import State, checkpoint
from kfcomm.elastic.checkpoint import Checkpoint, Draft, Writer, clear

JOB = "00ab"


def writer(path: Path, fill: int) -> Checkpoint:
    """One of `JOB`."""
    made = Checkpoint(path, 1, State(x=np.full(1000, fill)))
    made.lineage = [JOB]
    return made


class Halted:
    """Writer that halts after half of its draft, and continues on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.goes_on = threading.Event(), threading.Event()
        self._write: Callable[..., None] = checkpoint.write
        self._thread: int | None = None
        monkeypatch.setattr(checkpoint, "write", self)

    def __call__(self, raw: Any, *args: Any) -> None:
        """In the place of ``write``; the first that comes is halted."""
        if self._thread is None:
            self._thread = threading.get_ident()
            raw.write(b"half of it")
            raw.flush()
            self.is_there.set()
            self.goes_on.wait()
            raw.seek(0)
            raw.truncate()
        self._write(raw, *args)


async def read(path: Path) -> int:
    """Contents of the checkpoint."""
    state = State(x=np.zeros(1000, np.int64))
    await Checkpoint(path, 1, state).read()
    return int(state.x[0])


@pytest.mark.parametrize("num_written", [1, 2])
@pytest.mark.asyncio
async def test_a_halted_writer_that_was_given_up_replaces_nothing(
    num_written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are of one process number, as in two containers."""
    path = tmp_path / "c.npz"
    halted = Halted(monkeypatch)
    first, second = writer(path, 1), writer(path, 2)
    first.look(1, "first", 0)
    halted.is_there.wait()
    for number in range(num_written):
        second.look(2 + number, "second", 1)
        assert second._written is not None
        second._written.result()
    assert await read(path) == 2
    halted.goes_on.set()
    await first.close()
    assert await read(path) == 2
    assert "no checkpoint was written" in caplog.text
    first, third = writer(path, 3), writer(path, 4)
    first.look(9, "late", 0)
    await first.close()
    assert await read(path) == 2
    third.look(9, "third", 1)
    await third.close()
    await second.close()
    assert await read(path) == 4
    assert os.listdir(tmp_path) == ["c.npz"]


@pytest.mark.asyncio
async def test_a_writer_that_was_given_up_gives_way_to_the_draft_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.npz"
    halted = Halted(monkeypatch)
    first, second = writer(path, 1), writer(path, 2)
    second.look(2, "second", 1)
    halted.is_there.wait()
    first.look(3, "first", 0)
    await first.close()
    assert not path.exists()
    halted.goes_on.set()
    await second.close()
    assert await read(path) == 2


def test_drafts_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    living = Draft(path, Writer("0c", 0))
    other = Draft(tmp_path / "c", Writer(JOB, 0))
    dead = [tmp_path / f".c.npz.{name}" for name in ("77", "0c.1.00", f"{JOB}.0.00", f"{JOB}.1.00")]
    for one in dead:
        one.write_bytes(b"half")
    clear(path, Writer(JOB, 1))
    assert sorted(os.listdir(tmp_path)) == sorted([living.path.name, other.path.name])
    for one in (living, other):
        one.raw.flush()
        one.publish()
        one.close()
    assert sorted(os.listdir(tmp_path)) == ["c", "c.npz"]


def test_a_draft_that_is_taken_for_a_dead_ones_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks at it before it is locked."""
    path, taken = tmp_path / "c.npz", []
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if not taken:
            taken.append(descriptor)
            clear(path, Writer("0d", 0))
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    draft = Draft(path, Writer(JOB, 0))
    draft.raw.write(b"whole")
    draft.raw.flush()
    draft.publish()
    draft.close()
    assert path.read_bytes() == b"whole"


def test_drafts_of_others_stay_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    left = tmp_path / ".c.npz.77"
    left.touch()
    draft = Draft(tmp_path / "c.npz", Writer(JOB, 0))
    clear(tmp_path / "c.npz", Writer("0d", 0))
    draft.publish()
    draft.close()
    assert sorted(os.listdir(tmp_path)) == [".c.npz.77", "c.npz"]
