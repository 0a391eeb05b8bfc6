"""Ratios, whether they reach their aim, the text of the table, and the record."""

import json
from pathlib import Path

import pytest

from bench.compare.launch import LAUNCHES, Pythons
from bench.compare.record import from_record, to_record
from bench.compare.rounds import Figures
from bench.compare.rows import BLOCKING, ROWS, Case, Rival, Row, best_of, cases, floor, rival
from bench.compare.table import Results, Verdict, aligned, idle_share, lines, render, seconds
from bench.compare.worker import CONTENDERS
from bench.compare.works import WORKS, Entry, Mode
from bench.records import write


def figures(median_s: float) -> Figures:
    return Figures(median_s, median_s, median_s, median_s, median_s, calls=1, rounds=7, parked=0.001)


OURS, GLOO = Entry("kfcomm"), Entry("gloo")
VIEWS, COPY = Entry("gloo", Mode.VIEWS), Entry("copy", Mode.FLOOR)
ROW = Row(
    "some work",
    WORKS["1MiB"],
    4,
    OURS,
    (rival("Gloo", "gloo", 2, 4), best_of("best", "gloo", (Mode.ONE, Mode.VIEWS)), floor("copies", "copy", 0.5, 0.7)),
    note="a remark",
)


def results(**medians: float) -> Results:
    entries = {"ours": OURS, "gloo": GLOO, "views": VIEWS, "copy": COPY}
    return {(4, "1MiB"): {entries[name]: figures(median_s) for name, median_s in medians.items()}}


@pytest.mark.parametrize(
    ("theirs", "verdict"), [(3.9, Verdict.BELOW), (4.0, Verdict.MINIMUM), (7.9, Verdict.MINIMUM), (8.0, Verdict.AIM)]
)
def test_the_ratio_is_how_many_times_faster_we_are(theirs: float, verdict: Verdict) -> None:
    first, best, copies = lines(results(ours=2.0, gloo=theirs, views=1.0, copy=1.2), (ROW,))
    assert first.verdict is verdict
    assert (best.ratio, best.entry, best.verdict) == (0.5, VIEWS, Verdict.NONE)
    assert (copies.ratio, copies.verdict) == (0.6, Verdict.MINIMUM)


def test_unmeasured_entry_has_no_ratio() -> None:
    assert [one.ratio for one in lines(results(gloo=1.0), (ROW,))] == [None, None, None]
    assert [one.theirs for one in lines(results(ours=1.0), (ROW,))] == [None, None, None]
    assert lines({}, (ROW,)) == []
    assert "no figure" in render(results(gloo=1.0), (ROW,))


def test_the_table_is_markdown_with_even_columns() -> None:
    text = render(results(ours=0.002, gloo=0.01, views=0.004, copy=0.001), (ROW,)).splitlines()
    assert len({len(line) for line in text[:5]}) == 1
    assert "| some work, 4 ranks | 2 ms " in text[2]
    assert "| Gloo " in text[2]
    assert "| 5×    | 2×      | 4×  | aim " in text[2]
    assert "best (buckets, in place)" in text[3]
    assert "| 50%   | 50%     | 70% | minimum |" in text[4]
    assert text[-1] == "some work: a remark."


def test_columns_are_aligned() -> None:
    assert aligned([("a", "b"), ("long", "")]) == ["| a    | b |", "|------|---|", "| long |   |"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "no figure"), (12.34e-6, "12.3 µs"), (0.01234, "12.3 ms"), (1.5, "1.5 s")]
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_the_largest_idle_share_is_told() -> None:
    measured = {(4, "1KiB"): {BLOCKING: figures(1.0)}}
    assert idle_share(measured) == 0.001
    assert "0.10% of a core" in render(measured)
    assert idle_share(results(ours=1.0)) is None


def test_a_record_gives_the_results_back(tmp_path: Path) -> None:
    measured = results(ours=0.002, gloo=0.01)
    path = tmp_path / "deeper" / "record.json"
    write(to_record(measured, {"machine": {"cores": 2}}), path)
    record = json.loads(path.read_text())
    assert from_record(record) == measured
    assert record["machine"] == {"cores": 2}
    assert next(one["ratio"] for one in record["ratios"] if one["against"] == "Gloo") == 5.0
    with pytest.raises(ValueError, match="format"):
        from_record({"format": 0})


def test_everybody_in_the_rows_can_be_started() -> None:
    pythons = Pythons(own="own", openmpi="openmpi/bin/python", mpich="mpich/bin/python")
    for name in {entry.contender for case in cases() for entry in case.entries}:
        launch = LAUNCHES[name]
        assert launch.worker in CONTENDERS
        commands = launch.commands(pythons, 4)
        assert len(commands) == (1 if launch.start else 4)
        assert all(command[-1] == launch.worker for command, _ in commands)
    command, _ = LAUNCHES["mpich"].commands(pythons, 2)[0]
    assert command[:3] == ["mpich/bin/mpiexec", "-n", "2"]
    with pytest.raises(LookupError, match="not installed"):
        LAUNCHES["openmpi"].commands(Pythons(), 4)


def test_cases_bring_together_who_does_the_same_work() -> None:
    rows = (ROW, Row("again", WORKS["1MiB"], 4, BLOCKING, (rival("Gloo", "gloo"),)))
    entries = (OURS, GLOO, VIEWS, COPY, BLOCKING)
    assert cases(rows) == [Case(WORKS["1MiB"], 4, entries)]
    assert cases(rows, without=frozenset({"gloo", "copy"})) == [Case(WORKS["1MiB"], 4, (OURS, BLOCKING))]
    ranks = [case.ranks for case in cases()]
    assert ranks == sorted(ranks, reverse=True)


def judged(row: Row) -> list[Rival]:
    return [one for one in row.rivals if one.minimum is not None]


def test_every_aim_is_at_least_the_minimum() -> None:
    assert all(one.aim is not None and one.aim >= (one.minimum or 0) for row in ROWS for one in judged(row))
    assert sum(len(judged(row)) for row in ROWS) == 35
