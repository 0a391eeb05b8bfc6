"""Store in a folder: answered changes survive a crash and disk errors."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError, LocalProtocolError
from kfcomm.rendezvous.backends import file
from kfcomm.rendezvous.backends.file import FileStore
from kfcomm.rendezvous.keyvalue import MAX_VALUE_NBYTES, Exit, StoreClosed


def contents(folder: Path) -> dict[str, bytes]:
    """Contents after a restart."""
    found = FileStore(folder)
    try:
        return dict(found.contents.items())
    finally:
        asyncio.run(found.close(is_over=False))


async def crash(made: FileStore) -> None:
    """As if its process ended: nothing is written any more."""
    os.close(made._file)
    os.close(made._lock)
    made._lock = -1


@pytest.mark.asyncio
async def test_answered_changes_survive_a_crash(tmp_path: Path) -> None:
    made = FileStore(tmp_path / "a" / "store")
    assert await made.claim("world/0/0", b"x") == b"x"
    assert await made.claim("world/0/0", b"y") == b"x"
    await made.set("bounds", b"2:8")
    await made.set("bounds", b"2:9")
    await made.report_exit(Exit(3, -9))
    await made.report_exit(Exit(3, 1))
    await crash(made)
    again = FileStore(tmp_path / "a" / "store")
    assert again.contents.folder("world/0") == {"0": b"x"}
    assert again.contents.held("bounds") == b"2:9"
    assert again.contents.exits == {3: Exit(3, -9)}
    await again.clear("world")
    await crash(again)
    third = FileStore(tmp_path / "a" / "store")
    assert dict(third.contents.items()) == {"world/0/0": b"x"}
    await third.close(is_over=True)
    await third.close(is_over=True)
    assert os.listdir(tmp_path / "a" / "store") == ["lock"]
    with pytest.raises(StoreClosed):
        await third.set("a", b"")


@pytest.mark.asyncio
async def test_claims_of_many_at_once_have_one_winner(tmp_path: Path) -> None:
    made = FileStore(tmp_path)
    held = await asyncio.gather(*(made.claim(f"k/{at // 8}", b"%d" % at) for at in range(80)))
    for key in range(10):
        assert set(held[8 * key : 8 * key + 8]) == {b"%d" % (8 * key)}
    waiting = asyncio.ensure_future(made.claim("x", b"mine"))
    await asyncio.sleep(0)
    other = asyncio.ensure_future(made.claim("x", b"other"))
    await asyncio.sleep(0)
    waiting.cancel()  # who asked has gone; the claim stands
    assert await other == b"mine"
    await made.close(is_over=False)


@given(cut=st.integers(0, 400), flipped=st.none() | st.integers(0, 399))
def test_of_what_was_not_written_whole_the_whole_is_taken(
    cut: int, flipped: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")

    async def write() -> None:
        made = FileStore(folder)
        for at in range(10):
            await made.set(f"k/{at}", b"x" * at)
        await crash(made)

    asyncio.run(write())
    path = folder / "store"
    data = bytearray(path.read_bytes()[: len(file.MAGIC) + cut])
    if flipped is not None and len(file.MAGIC) + flipped < len(data):
        data[len(file.MAGIC) + flipped] ^= 0x40
    path.write_bytes(data)
    found = contents(folder)
    assert found == {f"k/{at}": b"x" * at for at in range(len(found))}
    assert contents(folder) == found


@pytest.mark.asyncio
async def test_a_folder_is_for_one_launcher(tmp_path: Path) -> None:
    made = FileStore(tmp_path)
    with pytest.raises(ConfigError, match=rf"is used by another launcher \(process {os.getpid()}\)"):
        FileStore(tmp_path)
    await made.close(is_over=False)
    (tmp_path / "store").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="does not hold a store of this version of kfcomm"):
        FileStore(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        FileStore(tmp_path / "file")


@pytest.mark.asyncio
async def test_the_file_does_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "SLACK_NBYTES", 1000)
    made = FileStore(tmp_path)
    for at in range(500):
        await made.set("k", b"%d" % at * 20)
    assert (tmp_path / "store").stat().st_size < 3000
    await crash(made)
    assert await asyncio.to_thread(contents, tmp_path) == {"k": b"499" * 20}


@pytest.mark.asyncio
async def test_values_out_of_bounds_are_refused(tmp_path: Path) -> None:
    made = FileStore(tmp_path)
    with pytest.raises(LocalProtocolError):
        await made.set("a", b"x" * (MAX_VALUE_NBYTES + 1))
    with pytest.raises(LocalProtocolError):
        await made.claim("\n", b"")
    await made.close(is_over=True)


@pytest.mark.asyncio
async def test_a_disk_that_is_full_is_told_of_and_written_anew_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kfcomm")
    monkeypatch.setattr(file, "AGAIN_S", 0.0)
    made = FileStore(tmp_path)
    await made.set("before", b"1")
    real, room = os.pwrite, 10

    def full(file: int, data: bytes, at: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        count = real(file, data[:room], at)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", full)
    await made.set("meanwhile", b"2")
    assert await made.claim("meanwhile", b"3") == b"2"
    await made.set("more", b"4")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device; the job goes on, and what changes from now on is not kept there" in caplog.text
    monkeypatch.setattr(os, "pwrite", real)
    await made.set("after", b"5")
    assert "can be written again: all is kept there" in caplog.text
    await crash(made)
    found = await asyncio.to_thread(contents, tmp_path)
    assert found == {"before": b"1", "meanwhile": b"2", "more": b"4", "after": b"5"}
