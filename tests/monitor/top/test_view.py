"""The view of `kfcomm top` in terminals of all sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.monitor.screen import Style, clipped, shares, size, span, view
from tests.monitor.top.test_change import Ranks, key, peer, says


def job(num_ranks=3, num_keys=3):
    def ranks(time_s):
        return [
            says(
                rank, time_s, size=num_ranks + 2, lag_s=0.0021,
                keys=[key(f"grad/{i}", count=int(10 * time_s)) for i in range(num_keys)],
                peers=[peer(other, time_s if other == 1 else 0.0, send_rate=1e6 * other) for other in range(num_ranks)],
            )
            for rank in range(num_ranks)
        ]  # fmt: skip

    made = Ranks(*ranks(0.0))
    return made, made.look(), made.look(*ranks(2.0))


def text_of(lines):
    return [line.text for line in lines]


def test_everything_is_there_where_there_is_room():
    _, first, second = job()
    lines = text_of(view(second, 200))
    assert lines[0] == "kfcomm top  j  3 of 5 ranks here, 2 on other hosts  strategy ring"
    assert lines[1] == "30 collectives/s   9.0 MB/s sent   loop lag at most 2.1 ms"
    assert lines[2] == "slowest: rank 1, with 100% of all waiting (6.0 s)"
    assert lines[4].split() == [
        "rank", "strategy", "calls/s", "sent/s", "received/s", "waits", "for", "loop", "lag", "peak", "mem",
    ]  # fmt: skip
    assert lines[5].split() == [
        "0",
        "ring",
        "30",
        "3.0",
        "MB",
        "0",
        "B",
        "rank",
        "1",
        "(100%)",
        "2.1",
        "ms",
        "1.0",
        "MB",
    ]
    assert "0 → 2  shm    2.0 MB  ████████████████████" in lines
    assert lines[-1].split() == ["grad/2", "10.0", "1.0", "KB", "100", "ms", "200", "ms", "300", "ms", "0"]
    assert text_of(view(first, 200))[1].startswith("- collectives/s")


@given(width=st.integers(1, 250), height=st.integers(1, 80), num_ranks=st.integers(1, 12), num_keys=st.integers(0, 30))
def test_no_line_is_too_long_and_there_are_not_too_many(width, height, num_ranks, num_keys):
    _, _, change = job(num_ranks, num_keys)
    lines = view(change, width, height)
    assert len(lines) <= height
    assert all(len(line.text) <= width for line in lines)
    assert lines[0].style is Style.TITLE


def test_training_gauges_are_shown():
    silent, speaking = says(0, 1.0), replace(says(1, 1.0), gauges={"noise_scale": 1234.56, "staleness": 0.5})
    lines = text_of(view(Ranks(silent, speaking).look(), 200))
    assert lines[2] == "training: noise_scale 1235   staleness 0.5"


def test_a_narrow_terminal_loses_columns_and_keeps_those_that_matter():
    _, _, change = job()
    heads = [line.text.split() for line in view(change, 44) if line.style is Style.HEAD]
    assert heads[0] == ["rank", "calls/s", "waits", "for", "loop", "lag"]
    assert heads[2] == ["name", "calls/s", "p50", "p99", "failed"]
    (narrower, *_) = [line.text.split() for line in view(change, 30) if line.style is Style.HEAD]
    assert narrower == ["rank", "calls/s", "waits", "for"]


def test_a_low_terminal_says_what_it_leaves_out():
    _, _, change = job(8, 20)
    lines = text_of(view(change, 100, 22))
    assert "... and 5 more" in lines
    assert "... and 17 more" in lines


@given(wanted=st.lists(st.integers(0, 40), min_size=1, max_size=4), room=st.integers(0, 100))
def test_tables_share_the_room(wanted, room):
    given_rows = shares(wanted, room)
    assert all(min(3, count) <= rows <= count for rows, count in zip(given_rows, wanted, strict=True))
    assert sum(given_rows) <= max(room, sum(min(3, count) for count in wanted))
    if room >= sum(min(3, count) for count in wanted):
        assert sum(given_rows) == min(room, sum(wanted))  # nothing is left empty while something is left out


def test_problems_are_shown_and_highlighted():
    made, _, _ = job()
    made.silent.add(1)
    change = made.look(says(0, 3.0, size=5, keys=[key(failures=2)]), without=[2])
    lines = view(change, 100)
    alarms = [line.text for line in lines if line.style is Style.ALARM]
    assert alarms[:2] == ["gone: rank 2", "no answer (stopped?): rank 1"]
    assert alarms[2].split() == ["1", "no", "answer"]
    assert alarms[3].split()[-1] == "2"
    end = view(made.look(without=[0, 1]), 100)
    assert "the job has ended: none of its ranks is left on this host" in text_of(end)


def test_strategies_that_differ_are_all_shown():
    lines = view(Ranks(says(0), says(1, strategy="star")).look(), 100)
    assert lines[0].text.endswith("strategy ring / star")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (99_949, "99.9 KB"), (99_950, "100 KB"), (7e12, "7.0 TB")],
)  # fmt: skip
def test_sizes(nbytes, shown):
    assert size(nbytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 µs"), (3e-7, "0 µs"), (4.2e-5, "42.0 µs"), (0.0021, "2.1 ms"), (0.5, "500 ms"), (300, "300 s")],
)  # fmt: skip
def test_times(seconds, shown):
    assert span(seconds) == shown


def test_texts_are_clipped_to_one_line():
    assert clipped("abc", 3) == "abc"
    assert clipped("abcd", 3) == "ab…"
    assert clipped("a\x1b[31m\n", 10) == "a�[31m�"
    assert clipped("ab", 0) == ""
