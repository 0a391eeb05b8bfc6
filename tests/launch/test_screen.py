import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.launch.output import MAX_LINE_NBYTES, LauncherScreen, OutputStyle, Stream, Writes

OUT, ERR = Stream.OUT, Stream.ERR
BOTH = frozenset((OUT, ERR))


def joined(writes: Writes, stream: Stream = OUT) -> bytes:
    return b"".join(data for each, data in writes if each is stream)


def shown(terminal: bytes) -> list[str]:
    """The rows that a terminal shows after these bytes; understands what `LauncherScreen` uses."""
    rows = [""]
    for part in terminal.decode().replace("\r\x1b[K", "\0").replace("\n", "\n\1").split("\1"):
        text = part.rpartition("\0")[2] if "\0" in part else rows[-1] + part
        rows[-1] = text.removesuffix("\n")
        if part.endswith("\n"):
            rows.append("")
    return rows


def test_lines_wait_until_they_are_whole() -> None:
    screen = LauncherScreen(OutputStyle(2))
    assert screen.feed(0, OUT, b"he") == []
    assert screen.feed(1, OUT, b"me too\n") == [(OUT, b"[1] me too\n")]
    assert screen.feed(0, OUT, b"llo\nwor") == [(OUT, b"[0] hello\n")]
    assert screen.end(0, OUT) == [(OUT, b"[0] wor\n")]
    assert screen.end(1, OUT) == []


def test_streams_stay_apart() -> None:
    screen = LauncherScreen(OutputStyle(1))
    assert screen.feed(0, ERR, b"warn") == []
    assert screen.feed(0, OUT, b"out\n") == [(OUT, b"[0] out\n")]
    assert screen.feed(0, ERR, b"ing\n") == [(ERR, b"[0] warning\n")]


def test_prefixes_have_one_width() -> None:
    assert joined(LauncherScreen(OutputStyle(11)).feed(3, OUT, b"x\n")) == b"[ 3] x\n"


@given(st.lists(st.sampled_from([b"ab", b"\n", b"\r", b"x\r\ny", b"\n\n", b"\r\r"])), st.integers(1, 5))
def test_how_output_is_cut_into_reads_does_not_matter(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    whole, pieces = LauncherScreen(OutputStyle(1)), LauncherScreen(OutputStyle(1))
    expected = joined([*whole.feed(0, OUT, data), *whole.end(0, OUT)])
    got = [write for at in range(0, len(data), size) for write in pieces.feed(0, OUT, data[at : at + size])]
    assert joined([*got, *pieces.end(0, OUT)]) == expected


def test_of_a_progress_bar_the_last_state_remains() -> None:
    screen = LauncherScreen(OutputStyle(1))
    assert screen.feed(0, OUT, b"\r 10%") == []
    assert screen.feed(0, OUT, b"\r 50%") == []
    assert screen.feed(0, OUT, b"\r100%\r\n") == [(OUT, b"[0] 100%\n")]


@pytest.mark.parametrize("form", ["\r{}", "{}\r"], ids=["return before", "return after"])
def test_progress_bar_without_a_terminal_is_a_line_per_second(form: str) -> None:
    screen = LauncherScreen(OutputStyle(2))
    lines = []
    for tenth in range(55):
        shown = joined(screen.feed(0, OUT, form.format(f"{tenth}%").encode(), now_s=tenth / 10))
        lines += shown.decode().splitlines()
        assert screen.feed(1, OUT, b"loss\n", now_s=tenth / 10) == [(OUT, b"[1] loss\n")]
    lines += joined(screen.feed(0, OUT, b"\n", now_s=5.5)).decode().splitlines()
    late = 0 if form.startswith("{") else 1  # what may not be complete is not shown
    begin = late  # of the first second
    assert lines == [f"[0] {begin + second * 10 - late}%" for second in range(1, 6)] + ["[0] 54%"]


def test_a_bar_that_ends_soon_is_one_line() -> None:
    screen = LauncherScreen(OutputStyle(1))
    for percent in range(100):
        assert screen.feed(0, OUT, f"\r{percent}%".encode(), now_s=percent / 200) == []
    assert screen.end(0, OUT) == [(OUT, b"[0] 99%\n")]


def test_lines_with_returns_before_their_newlines_are_no_bars() -> None:
    screen = LauncherScreen(OutputStyle(1))
    for second in range(5):
        assert screen.feed(0, OUT, b"line\r", now_s=2.0 * second) == []
        assert screen.feed(0, OUT, b"\n", now_s=2.0 * second + 1.5) == [(OUT, b"[0] line\n")]


def test_on_a_terminal_a_bar_adds_no_lines() -> None:
    screen = LauncherScreen(OutputStyle(1, terminals=BOTH))
    terminal = b"".join(joined(screen.feed(0, OUT, f"\r{one}%".encode(), now_s=5.0 * one)) for one in range(9))
    assert shown(terminal) == ["[0] 8%"]


def test_on_a_terminal_a_progress_bar_moves_below_the_lines_of_others() -> None:
    screen = LauncherScreen(OutputStyle(2, terminals=BOTH))
    terminal = b""
    for rank, data, rows in (
        (0, b"\r 10%", ["[0]  10%"]),
        (1, b"hello\n", ["[1] hello", "[0]  10%"]),
        (0, b"\r 50%", ["[1] hello", "[0]  50%"]),
        (1, b"part", ["[1] hello", "[1] part"]),
        (0, b"\r100%\n", ["[1] hello", "[0] 100%", "[1] part"]),
        (1, b"ly\n", ["[1] hello", "[0] 100%", "[1] partly", ""]),
    ):
        terminal += joined(screen.feed(rank, OUT, data))
        assert shown(terminal) == rows


def test_a_bar_that_clears_itself_is_gone() -> None:
    screen = LauncherScreen(OutputStyle(1, terminals=BOTH))
    terminal = joined(screen.feed(0, OUT, b"\r 10%")) + joined(screen.feed(0, OUT, b"\r    \r"))
    assert shown(terminal) == [""]


def test_an_incomplete_line_is_cut_to_one_row() -> None:
    screen = LauncherScreen(OutputStyle(1, terminals=BOTH, columns=20))
    (row,) = shown(joined(screen.feed(0, OUT, "\x1b[31m█".encode() + b"x" * 100)))
    assert row == "[0] █" + "x" * 14
    assert len(row) < 20


def test_lines_to_a_file_leave_the_terminal_alone() -> None:
    screen = LauncherScreen(OutputStyle(1, terminals=frozenset((ERR,))))
    assert shown(joined(screen.feed(0, ERR, b"50%"), ERR)) == ["[0] 50%"]
    assert screen.feed(0, OUT, b"line\n") == [(OUT, b"[0] line\n")]


def test_the_launchers_own_lines_do_not_run_into_others() -> None:
    screen = LauncherScreen(OutputStyle(1, terminals=BOTH))
    terminal = joined(screen.feed(0, ERR, b"50%"), ERR) + joined(screen.say("bye"), ERR)
    assert shown(terminal) == ["kfcomm: bye", ""]


def test_colours_tell_ranks_apart_and_do_not_leak() -> None:
    screen = LauncherScreen(OutputStyle(2, color=True))
    zero, one = joined(screen.feed(0, OUT, b"x\n")), joined(screen.feed(1, OUT, b"\x1b[31mred\n"))
    assert zero.split(b"[0]")[0] != one.split(b"[1]")[0]
    assert one.endswith(b"\x1b[31mred\x1b[0m\n")


@pytest.mark.parametrize("terminals", [frozenset(), BOTH])
def test_a_line_without_end_takes_bounded_memory(terminals: frozenset[Stream]) -> None:
    screen = LauncherScreen(OutputStyle(1, terminals=terminals))
    part = b"x" * (1 << 20)
    written = sum(len(joined(screen.feed(0, OUT, part))) for _ in range(40))
    assert written >= 40 * len(part) - MAX_LINE_NBYTES
    assert len(joined(screen.end(0, OUT))) <= MAX_LINE_NBYTES + len(b"\r\x1b[K[0] \n")


def test_a_long_line_is_kept_whole() -> None:
    screen = LauncherScreen(OutputStyle(2))
    line = b"x" * 3_000_000
    for at in range(0, len(line), 1 << 16):
        assert screen.feed(0, OUT, line[at : at + (1 << 16)]) == []
    assert screen.feed(1, OUT, b"between\n") == [(OUT, b"[1] between\n")]
    assert joined(screen.feed(0, OUT, b"\n")) == b"[0] " + line + b"\n"
