"""Of tracebacks that several ranks print alike one is shown, whatever differs is, and nothing is held back for long."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kfcomm
from kfcomm.launch.tracebacks import ALIKE_WITHIN_S, HELD_FOR_S, MAX_NBYTES, Error, Repeats

HEAD = b"Traceback (most recent call last):\n"
WAY = HEAD + b'  File "train.py", line 3, in <module>\n    fail()\n'
TEXT = WAY + b"ValueError: why\n"
OWN = b'  File "' + kfcomm.__file__.encode() + b'", line %d, in call\n    raise error\n'


class Ranks:
    """Shown output and merged lines of some ranks."""

    def __init__(self) -> None:
        self.repeats = Repeats()
        self.shown: dict[int, bytes] = {}
        self.now_s = 0.0
        self.is_ending = False

    def write(self, rank: int, data: bytes) -> None:
        """Some data; nothing for the end."""
        self._show(rank, self.repeats.shown(rank, data, self.now_s))
        self.settle()

    def end(self, rank: int, data: bytes) -> None:
        self.write(rank, data)
        self.write(rank, b"")

    def settle(self, *, is_over: bool = False) -> None:
        for rank, text in self.repeats.settle(self.now_s, is_ending=self.is_ending, is_over=is_over):
            self._show(rank, text)

    def _show(self, rank: int, data: bytes) -> None:
        self.shown[rank] = self.shown.get(rank, b"") + data


def test_an_error_of_all_is_shown_once() -> None:
    ranks = Ranks()
    for rank in (3, *range(3), *range(4, 32)):
        ranks.end(rank, b"a warning\n" + TEXT)
    assert ranks.shown.pop(3) == b"a warning\n" + TEXT
    assert set(ranks.shown.values()) == {b"a warning\n"}
    assert ranks.repeats.tell() == ["ranks 0-31: ValueError (as shown for rank 3)"]
    assert not ranks.repeats.is_waiting
    assert ranks.repeats.tell() == []


def test_the_traceback_of_the_first_is_shown_as_it_is_written() -> None:
    ranks = Ranks()
    for at in range(len(TEXT)):
        ranks.write(0, TEXT[at : at + 1]) if at >= len(HEAD) else None
        if at == len(HEAD) - 1:
            ranks.write(0, HEAD)
    assert ranks.shown[0] == TEXT


def test_tracebacks_that_are_written_at_once() -> None:
    ranks = Ranks()
    for line in TEXT.splitlines(keepends=True):
        for rank in range(4):
            ranks.write(rank, line)
    for rank in (3, 2, 1, 0):
        ranks.write(rank, b"")
    assert [ranks.shown.get(rank, b"") for rank in range(4)] == [TEXT, b"", b"", b""]
    assert ranks.repeats.tell() == ["ranks 0-3: ValueError (as shown for rank 0)"]


def test_errors_that_differ_are_all_shown() -> None:
    ranks = Ranks()
    texts = [WAY.replace(b"line 3", f"line {rank}".encode()) + b"ValueError: why\n" for rank in range(4)]
    for rank, text in enumerate(texts):
        ranks.end(rank, text)
    assert [ranks.shown[rank] for rank in range(4)] == texts
    assert ranks.repeats.tell() == []


def test_messages_that_differ_are_shown_without_the_way_to_them() -> None:
    ranks = Ranks()
    for rank in range(4):
        ranks.end(rank, WAY + f"ValueError: of rank {rank // 2}\n  and more of {rank // 2}\n".encode())
    assert ranks.shown.pop(0).count(b"Traceback") == 1
    assert set(ranks.shown.values()) == {b""}
    assert ranks.repeats.tell() == [
        "ranks 0-1: ValueError (as shown for rank 0)",
        "ranks 2-3: ValueError: of rank 1 (at the same place as rank 0)",
        "  and more of 1",
    ]


def test_frames_of_kfcomm_itself_make_no_difference() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.end(rank, WAY + OWN % rank * rank + b"ValueError: why\n")
    assert [ranks.shown.get(rank, b"") for rank in (1, 2)] == [b"", b""]
    assert ranks.repeats.tell() == ["ranks 0-2: ValueError (as shown for rank 0)"]


def test_a_traceback_that_was_told_is_known_before_its_stream_ends() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.repeats.told(rank, TEXT)
        ranks.write(rank, b"before\n" + TEXT + b"after\n")
    assert ranks.shown == {0: b"before\n" + TEXT + b"after\n", 1: b"before\nafter\n", 2: b"before\nafter\n"}
    assert ranks.repeats.tell() == ["ranks 0-2: ValueError (as shown for rank 0)"]


def test_traceback_of_a_rank_that_keeps_running_is_shown_after_a_delay() -> None:
    ranks = Ranks()
    ranks.end(0, TEXT)
    ranks.write(1, TEXT)
    assert ranks.shown[1] == b""
    ranks.now_s += HELD_FOR_S
    ranks.settle()
    ranks.write(1, b"goes on\n")
    assert ranks.shown[1] == TEXT + b"goes on\n"
    assert ranks.repeats.tell() == []


def test_output_of_a_leaving_rank_is_complete_after_a_delay() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.repeats.leaves(rank)
        ranks.write(rank, b"kfcomm: error: no\n")
    ranks.now_s += HELD_FOR_S
    ranks.settle()
    assert ranks.shown == {0: b"kfcomm: error: no\n", 1: b"", 2: b""}
    assert ranks.repeats.tell() == ["ranks 0-2: the same error (as shown for rank 0)"]


def test_rank_asked_to_end_is_awaited() -> None:
    ranks = Ranks()
    for rank in range(3):
        ranks.write(rank, TEXT)
    ranks.now_s += 2 * HELD_FOR_S
    ranks.is_ending = True
    ranks.settle()
    for rank in range(3):
        ranks.write(rank, b"")
    assert ranks.shown == {0: TEXT, 1: b"", 2: b""}
    assert ranks.repeats.tell() == ["ranks 0-2: ValueError (as shown for rank 0)"]


def test_the_same_error_later_is_shown_again() -> None:
    ranks = Ranks()
    ranks.end(0, TEXT)
    ranks.now_s += ALIKE_WITHIN_S + 1.0
    ranks.end(1, TEXT)
    assert ranks.shown == {0: TEXT, 1: TEXT}


def test_no_output_is_held_back_at_the_end() -> None:
    ranks = Ranks()
    ranks.write(0, HEAD)
    ranks.write(1, HEAD)
    ranks.end(2, TEXT[:-1])
    ranks.settle(is_over=True)
    assert ranks.shown == {0: HEAD, 1: HEAD, 2: TEXT}
    assert not ranks.repeats.is_waiting


def test_output_after_a_merged_traceback_is_shown() -> None:
    ranks = Ranks()
    ranks.write(0, HEAD)  # the others wait until it is whole
    ranks.repeats.told(1, TEXT)
    ranks.write(1, TEXT)
    ranks.write(1, b"after\n")
    ranks.end(1, b"and more\n")
    assert ranks.shown[1] == b"after\nand more\n"
    ranks.end(0, TEXT[len(HEAD) :])
    assert ranks.repeats.tell() == ["ranks 0-1: ValueError (as shown for rank 0)"]


def test_very_long_output_is_not_held_back() -> None:
    ranks = Ranks()
    ranks.end(0, TEXT)
    ranks.write(1, WAY)
    ranks.write(1, b"x" * MAX_NBYTES)
    assert ranks.shown[1] == WAY + b"x" * MAX_NBYTES


GROUP = b"""\
  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 4, in <module>
  | ExceptionGroup: several (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +------------------------------------
"""
USAGE = b"usage: train.py [-h]\n                [--epochs N]\ntrain.py: error: unrecognized arguments: --lr\n"
NO_FILE = b"/usr/bin/python3.11: can't open file '/x/trian.py': [Errno 2] No such file or directory\n"
SYNTAX = b'  File "train.py", line 1\n    x = (\n        ^\nSyntaxError: it was never closed\n'
CHAIN = TEXT + b"\nDuring handling of the above exception, another exception occurred:\n\n" + WAY + b"KeyError: 1\n"


@pytest.mark.parametrize(
    ("text", "summary", "kind"),
    [
        (GROUP, "ExceptionGroup: several (2 sub-exceptions)", "the same error"),
        (SYNTAX, "SyntaxError: it was never closed", "SyntaxError"),
        (CHAIN, "KeyError: 1", "KeyError"),
        (USAGE, "train.py: error: unrecognized arguments: --lr", "the same error"),
        (NO_FILE, NO_FILE.decode().rstrip(), "the same error"),
        (b"kfcomm: error: no\n", "kfcomm: error: no", "the same error"),
    ],
    ids=["group", "syntax", "chain", "usage", "interpreter", "our own"],
)
def test_kinds_of_tracebacks(text: bytes, summary: str, kind: str) -> None:
    assert Error.of(text).summary == summary
    ranks = Ranks()
    for rank in range(2):
        ranks.end(rank, text)
    assert ranks.shown == {0: text, 1: b""}
    assert ranks.repeats.tell() == [f"ranks 0-1: {kind} (as shown for rank 0)"]
    assert ranks.repeats.common == {summary}


def test_after_ctrl_c_only_errors_of_the_program_are_shown() -> None:
    ranks = Ranks()
    ranks.repeats.is_interrupted = ranks.is_ending = True
    for rank in range(3):
        ranks.end(rank, b"last words\n" + WAY + b"KeyboardInterrupt\n")
    ranks.end(3, TEXT)
    ranks.settle(is_over=True)
    assert ranks.shown == {**dict.fromkeys(range(3), b"last words\n"), 3: TEXT}
    assert ranks.repeats.tell() == []


EVENTS = ["", "", "told", "leaves", "ending"]
PIECES = [
    HEAD,
    WAY,
    TEXT,
    b"",
    b"ValueError: why\n",
    b"a line\n",
    b'  File "x", line 3\n',
    b"    code\n",
    USAGE,
]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(PIECES),
            st.floats(0, 1.5),
            st.sampled_from(EVENTS),
        ),
        max_size=40,
    )
)
def test_everything_is_shown_or_told(steps: list[tuple[int, bytes, float, str]]) -> None:
    ranks = Ranks()
    written: dict[int, bytes] = dict.fromkeys(range(3), b"")
    ended: set[int] = set()
    told: list[str] = []
    for rank, data, passed_s, event in steps:
        if rank in ended:
            continue
        ranks.now_s += passed_s
        if event == "told":
            ranks.repeats.told(rank, TEXT)
        elif event == "leaves":
            ranks.repeats.leaves(rank)
        ranks.is_ending = ranks.is_ending or event == "ending"
        ranks.write(rank, data)
        written[rank] += data
        if not data:
            ended.add(rank)
        told += ranks.repeats.tell()
    ranks.settle(is_over=True)
    told += ranks.repeats.tell()
    assert not ranks.repeats.is_waiting
    for rank, data in written.items():
        shown = ranks.shown.get(rank, b"")
        hidden = Counter(data.splitlines()) - Counter(shown.splitlines())
        if hidden:
            # what is not shown here is shown for another rank or before, or is told
            anywhere = b"\n".join(ranks.shown.values()).splitlines()
            assert any(str(rank) in line or "-" in line for line in told)
            assert all(line in anywhere or any(line.decode() in one for one in told) for line in hidden)
        assert not Counter(shown.splitlines()) - Counter(data.splitlines())


def test_time_does_not_matter_for_what_is_alike() -> None:
    assert not Repeats().settle(math.inf)
