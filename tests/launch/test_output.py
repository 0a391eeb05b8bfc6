"""Output that cannot be written is dropped and counted, with a message on the other stream."""

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from kfcomm.launch.output import Dropped, LauncherScreen, Log, Output, OutputStyle, Stream


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        os.close(descriptor)


def full(mode: int = os.O_WRONLY) -> int:
    return os.open("/dev/full", mode)


def unexpected() -> None:
    raise AssertionError


@pytest.mark.asyncio
@pytest.mark.parametrize("broken", [Stream.OUT, Stream.ERR])
async def test_a_full_disk_is_told_once_on_the_other_stream_and_counted(broken: Stream, pipe: tuple[int, int]) -> None:
    other = Stream.ERR if broken is Stream.OUT else Stream.OUT
    descriptor = full()
    output = Output(LauncherScreen(OutputStyle(2)), unexpected, {broken: descriptor, other: pipe[1]})
    for _ in range(3):
        await output.feed(0, broken, b"lost\n")
    await output.feed(0, other, b"kept\n")
    await output.finish()
    os.close(descriptor)
    told = os.read(pipe[0], 4096).decode().splitlines()
    name = "standard output" if broken is Stream.OUT else "standard error"
    assert told == [
        f"kfcomm: {name} cannot be written (No space left on device): it is dropped, the job goes on",
        "[0] kept",
        f"kfcomm: 27 bytes of {name} could not be written (No space left on device)",
    ]


@pytest.mark.asyncio
async def test_both_streams_are_full() -> None:
    descriptor = full()
    output = Output(LauncherScreen(OutputStyle(1)), unexpected, dict.fromkeys(Stream, descriptor))
    for stream in Stream:
        await output.feed(0, stream, b"lost\n")
    await output.finish()
    os.close(descriptor)


@pytest.mark.asyncio
async def test_broken_pipe_is_reported_once() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    broken: list[int] = []
    output = Output(LauncherScreen(OutputStyle(1)), lambda: broken.append(1), dict.fromkeys(Stream, writer))
    for _ in range(2):
        await output.feed(0, Stream.OUT, b"x\n")
    await output.finish()
    assert broken == [1]
    os.close(writer)


@pytest.mark.asyncio
async def test_abandoned_output_is_dropped(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    while select.select([], [pipe[1]], [], 0)[1]:
        os.write(pipe[1], bytes(4096))
    os.set_blocking(pipe[1], True)
    output = Output(LauncherScreen(OutputStyle(1)), unexpected, dict.fromkeys(Stream, pipe[1]))
    output.abandon()
    await output.feed(0, Stream.OUT, b"x\n")


def test_a_log_that_cannot_be_written_says_so_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")
    log = Log(path)
    assert log.write(b"12345") == f"{path} cannot be written (No space left on device): it is dropped, the job goes on"
    assert log.write(b"678") is None
    assert log.dropped.total() == f"8 bytes of {path} could not be written (No space left on device)"
    log.close()


def test_a_log_that_cannot_be_made_says_so_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "taken" / "log")
    assert log.write(b"") is None
    assert "No such file or directory" in str(log.write(b"12345"))
    (tmp_path / "taken").mkdir()
    assert log.write(b"678") is None
    log.close()
    assert (log.dropped.nbytes, (tmp_path / "taken" / "log").read_bytes()) == (5, b"678")


def test_first_drop_is_reported() -> None:
    dropped = Dropped("standard output")
    assert dropped.add(1, OSError(5, "Input/output error")) is not None
    assert dropped.add(1, OSError(5, "Input/output error")) is None
    assert dropped.nbytes == 2
