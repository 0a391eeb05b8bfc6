"""A running job at a glance: what changed between two looks, and how much of it fits on a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.monitor.live import Job
from kfcomm.monitor.relaying import Relayed
from kfcomm.monitor.screen import Style, clipped, shares, size, span, view
from kfcomm.monitor.statistics import KeyStatistics, PeerStatistics, Statistics
from kfcomm.monitor.top import JobWatcher, LinkRate


def key(name="grad", count=0, total_s=0.0, **changes):
    usual = {"nbytes": 100 * count, "p50_s": 0.1, "p99_s": 0.2, "max_s": 0.3, "failures": 0}
    return KeyStatistics(name=name, count=count, total_s=total_s, **{**usual, **changes})


def peer(rank, waited_s=0.0, send_rate=0.0, receive_rate=0.0, link="shm"):
    return PeerStatistics(rank, link, 0, 0, 0, 0, send_rate, receive_rate, waited_s)


def says(rank, time_s=0.0, *, size=2, keys=(), peers=(), others=None, strategy="ring", lag_s=0.0, epoch=0):
    return Statistics(time_s, rank, size, strategy, tuple(peers), tuple(keys), others, (), lag_s, 1 << 20, epoch=epoch)


class Ranks:
    """A job whose ranks say what the test wants."""

    def __init__(self, *answers):
        self.answers = {answer.rank: answer for answer in answers}
        self.silent = set()
        self.watcher = JobWatcher("j", find=self._find, read=self._read)

    def _find(self):
        return [Job("other", ((0, "x"),)), Job("j", tuple((rank, f"s{rank}") for rank in sorted(self.answers)))]

    def _read(self, job):
        assert job.name == "j"
        return [self.answers[rank] for rank in job.ranks if rank not in self.silent]

    def look(self, *answers, without=()):
        self.answers.update({answer.rank: answer for answer in answers})
        for rank in without:
            del self.answers[rank]
        return self.watcher.look()


def test_rates_are_those_since_the_last_look():
    job = Ranks(says(0, 10.0, keys=[key(count=100, total_s=1.0)]), says(1, 10.0, keys=[key(count=100)]))
    first = job.look()
    assert first.passed_s == 0.0
    assert [one.calls_per_s for one in first.ranks.values()] == [0.0, 0.0]
    second = job.look(
        says(0, 12.0, keys=[key(count=120, total_s=1.5, failures=1), key("new", count=2)], others=key(count=10)),
        says(1, 11.0, keys=[key(count=105, p50_s=0.3, p99_s=0.9, max_s=1.0, failures=2)]),
    )
    assert second.passed_s == 2.0
    assert [one.calls_per_s for one in second.ranks.values()] == [16.0, 5.0]
    grad, new = second.keys
    assert (grad.name, grad.calls_per_s, grad.nbytes_per_s) == ("grad", 10.0, 1000.0)
    assert (grad.p50_s, grad.p99_s, grad.max_s, grad.failures) == (pytest.approx(0.2), 0.9, 1.0, 3)
    assert (new.name, new.calls_per_s) == ("new", 1.0)


def test_the_slowest_is_the_one_that_all_have_waited_for_longest():
    before = [
        says(rank, 0.0, size=3, peers=[peer(other, 5.0) for other in range(3) if other != rank]) for rank in range(3)
    ]
    job = Ranks(*before)
    assert job.look().slowest is not None
    change = job.look(
        says(0, 1.0, size=3, peers=[peer(1, 5.1), peer(2, 5.5)]),
        says(1, 1.0, size=3, peers=[peer(0, 5.0), peer(2, 5.4, link="tcp"), peer(2, 0.2)]),
        says(2, 1.0, size=3, peers=[peer(0, 5.3), peer(1, 5.0)]),
    )  # fmt: skip
    assert change.slowest == 2
    assert {rank: round(seconds, 6) for rank, seconds in change.waited_for.items()} == {0: 0.3, 1: 0.1, 2: 1.1}
    assert [one.waits_for for one in change.ranks.values()] == [2, 2, 0]
    assert job.look().slowest is None


def test_links_are_there_once_in_each_direction_with_those_to_other_hosts():
    job = Ranks(
        says(0, peers=[peer(1, send_rate=5.0, receive_rate=9.0), peer(7, send_rate=2.0, receive_rate=3.0, link="tcp")]),
        says(1, peers=[peer(0, send_rate=9.0, receive_rate=5.0)]),
    )
    assert job.look().links == [
        LinkRate(1, 0, "shm", 9.0), LinkRate(0, 1, "shm", 5.0), LinkRate(7, 0, "tcp", 3.0), LinkRate(0, 7, "tcp", 2.0),
    ]  # fmt: skip


def test_ranks_that_do_not_answer_or_are_gone_are_told_apart():
    job = Ranks(says(0, 1.0, size=4, keys=[key(count=1)]), says(1, size=4), says(2, size=4))
    job.look()
    job.silent.add(1)
    change = job.look(says(0, 2.0, size=4, keys=[key(count=5)]), without=[2])
    assert (change.size, change.gone) == (4, [2])
    assert change.ranks[1].now is None
    assert change.ranks[0].calls_per_s == 4.0
    assert not change.has_ended
    job.silent.clear()
    back = job.look(says(1, 9.0, size=4))
    assert back.ranks[1].now is not None
    end = job.look(without=[0, 1])
    assert (end.has_ended, end.gone, end.size) == (True, [0, 1, 2], 4)


class Processes:
    """A job whose processes, known by their sockets, say what the test wants, whatever their ranks are."""

    def __init__(self):
        self.answers = {}
        self.watcher = JobWatcher("j", find=self._find, read=self._read)

    def _find(self):
        return [Job("j", tuple((rank, name) for name, (rank, _) in self.answers.items()))]

    def _read(self, job):
        return [said for _, name in job.sockets if (said := self.answers[name][1]) is not None]

    def look(self, **answers):
        """``name=(rank at its beginning, what it says)``; those that are not named are gone."""
        self.answers = answers
        return self.watcher.look()


def calls(count):
    return [key(count=count, total_s=count / 10)]


def test_rates_do_not_fall_below_nothing_when_the_ranks_change():
    job = Processes()
    job.look(a=(0, says(0, 1.0, keys=calls(1000))), b=(1, says(1, 1.0, keys=calls(1000))))
    grown = job.look(
        a=(0, says(0, 2.0, size=3, epoch=1, keys=calls(20))),
        b=(1, says(1, 2.0, size=3, epoch=1, keys=calls(20))),
        c=(2, says(2, 2.0, size=3, epoch=1, keys=calls(20))),
    )
    assert [one.calls_per_s for one in grown.ranks.values()] == [0.0, 0.0, 0.0]
    assert [(one.calls_per_s, one.nbytes_per_s, one.busy_s) for one in grown.keys] == [(0.0, 0.0, 6.0)]
    later = job.look(
        a=(0, says(0, 3.0, size=3, epoch=1, keys=calls(30))),
        b=(1, says(1, 3.0, size=3, epoch=1, keys=calls(30))),
        c=(2, says(2, 3.0, size=3, epoch=1, keys=calls(30))),
    )
    assert [one.calls_per_s for one in later.ranks.values()] == [10.0, 10.0, 10.0]


def test_a_rank_is_followed_by_its_process_when_it_is_numbered_anew():
    job = Processes()
    first = job.look(**{name: (rank, says(rank, 1.0, size=3)) for rank, name in enumerate("abc")})
    assert (first.size, sorted(first.ranks), first.gone) == (3, [0, 1, 2], [])
    # rank 1 died: rank 2 is rank 1 now, and another process came as rank 2
    second = job.look(
        a=(0, says(0, 2.0, size=3, epoch=2, keys=calls(10))),
        c=(2, says(1, 2.0, size=3, epoch=2, keys=calls(10))),
        d=(2, says(2, 2.0, size=3, epoch=2, keys=calls(10))),
    )
    assert (second.size, sorted(second.ranks), second.gone) == (3, [0, 1, 2], [])
    assert all(one.now is not None for one in second.ranks.values())


def test_ranks_that_were_released_are_not_gone_and_do_not_count():
    job = Processes()
    job.look(**{name: (rank, says(rank, 1.0, size=3)) for rank, name in enumerate("abc")})
    change = job.look(a=(0, says(0, 2.0, size=2, epoch=1)), b=(1, says(1, 2.0, size=2, epoch=1)))
    assert (change.size, sorted(change.ranks), change.gone) == (2, [0, 1], [])
    change = job.look(a=(0, says(0, 3.0, size=2, epoch=1)))
    assert (change.size, sorted(change.ranks), change.gone) == (2, [0], [1])


def test_rank_of_an_earlier_epoch_keeps_its_view():
    job = Processes()
    change = job.look(
        a=(0, says(0, 1.0, size=2, epoch=1)), b=(1, says(1, 1.0)), c=(2, says(1, 1.0, size=2, epoch=1, lag_s=5.0))
    )
    assert sorted(change.ranks) == [0, 1]
    assert change.ranks[1].now.loop_lag_s == 5.0
    late = job.look(a=(0, says(0, 2.0, size=2, epoch=2)), b=(1, says(1, 1.0)))
    assert sorted(late.ranks) == [0, 1]


def test_internal_calls_share_one_line_and_are_not_counted():
    own = [key(name, count=10) for name in ("kfcomm/boundary", "kfcomm/plans (data)", "(strategy)")]
    job = Ranks(says(0, 1.0), says(1, 1.0))
    job.look()
    change = job.look(
        *(says(rank, 2.0, keys=[*own, key("mine", count=4), key("tag 'kfcomm/x'", 5)]) for rank in (0, 1))
    )
    assert {one.name: one.calls_per_s for one in change.keys} == {"mine": 4.0, "(kfcomm itself)": 35.0}
    assert change.ranks[0].calls_per_s == 4.0


def test_the_steps_of_a_call_are_one_line():
    told = [key("objects", count=4, p50_s=0.1), key("objects (data)", count=4, p50_s=0.2, failures=1)]
    unnamed = [key("", count=2), key("(data)", count=2)]
    job = Ranks(says(0, 1.0), says(1, 1.0))
    job.look()
    change = job.look(says(0, 2.0, keys=told + unnamed))
    objects = next(one for one in change.keys if one.name == "objects")
    assert {one.name: one.calls_per_s for one in change.keys} == {"objects": 4.0, "": 2.0}
    assert (objects.nbytes_per_s, objects.p50_s, objects.failures) == (800.0, pytest.approx(0.3), 1)
    assert change.ranks[0].calls_per_s == 6.0


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
        "0", "ring", "30", "3.0", "MB", "0", "B", "rank", "1", "(100%)", "2.1", "ms", "1.0", "MB",
    ]  # fmt: skip
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


class Hosts(Ranks):
    """A job with ranks of another host, which the ranks here pass questions on to."""

    def __init__(self, monkeypatch, *answers):
        super().__init__(*answers)
        self.elsewhere = {}
        self.asked = []
        monkeypatch.setattr("kfcomm.monitor.top.relayed", self._relayed)

    def _relayed(self, name, ranks, question):
        self.asked.append((name, list(ranks)))
        return {rank: self.elsewhere[rank] for rank in ranks if rank in self.elsewhere}


def told(process, answer, *, epoch=0, is_gone=False):
    return Relayed(epoch, process, is_gone, None if answer is None else answer.as_json())


def test_ranks_of_other_hosts_are_asked_by_way_of_those_here_and_shown(monkeypatch):
    job = Hosts(monkeypatch, *(says(rank, 1.0, size=5) for rank in range(2)))
    assert len(job.look().ranks) == 2  # of a version that passes nothing on, say
    assert job.asked == [("s0", [2, 4]), ("s1", [3])]
    job.elsewhere = {rank: told(rank, says(rank, 1.0, size=5, keys=calls(10))) for rank in (2, 3)}
    change = job.look()
    assert list(change.ranks) == [0, 1, 2, 3]
    assert [one.is_here for one in change.ranks.values()] == [True, True, False, False]
    job.elsewhere = {
        2: told(2, says(2, 2.0, size=5, keys=calls(30), peers=[peer(4, 1.0, 5.0, 3.0)])), 3: told(3, None),
        4: told(4, None, is_gone=True),
    }  # fmt: skip
    change = job.look()
    assert (change.ranks[2].calls_per_s, change.waited_for[4], change.gone) == (20.0, 1.0, [4])
    assert change.ranks[3].now is None
    assert LinkRate(2, 4, "shm", 5.0) in change.links
    job.elsewhere = {}
    assert [rank for rank, one in job.look().ranks.items() if one.now is None] == [2, 3]  # not asked, but still there


def test_rank_of_another_host_is_followed_by_its_process(monkeypatch):
    job = Hosts(monkeypatch, says(0, 1.0, size=3))
    job.elsewhere = {1: told(1, None, is_gone=True), 2: told(2, says(2, 1.0, size=3))}
    change = job.look()
    assert (sorted(change.ranks), change.gone) == ([0, 2], [1])
    process = change.ranks[2].process
    job.elsewhere = {1: told(2, says(1, 2.0, size=2))}  # from the epoch before
    change = job.look(says(0, 2.0, size=2, epoch=1))
    assert (sorted(change.ranks), change.gone) == ([0], [])
    job.elsewhere = {1: told(2, says(1, 2.0, size=2, epoch=1), epoch=1)}
    change = job.look()
    assert (sorted(change.ranks), change.gone) == ([0, 1], [])
    assert change.ranks[1].process == process


def test_without_ranks_here_that_answer_those_elsewhere_do_not_either(monkeypatch):
    job = Hosts(monkeypatch, says(0, 1.0))
    job.elsewhere = {1: told(1, says(1, 1.0))}
    job.look()
    job.silent.add(0)
    assert [one.now for one in job.look().ranks.values()] == [None, None]
    assert job.look(without=[0]).has_ended
