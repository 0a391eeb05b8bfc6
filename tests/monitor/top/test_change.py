"""Changes that `kfcomm top` derives from two readings of a job."""

from __future__ import annotations

import pytest

from kfcomm.monitor.live import Job
from kfcomm.monitor.statistics import KeyStatistics, PeerStatistics, Statistics
from kfcomm.monitor.top import LinkRate, Watcher


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
        self.watcher = Watcher("j", find=self._find, read=self._read)

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
        self.watcher = Watcher("j", find=self._find, read=self._read)

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
