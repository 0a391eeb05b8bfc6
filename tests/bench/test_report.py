"""From events to lines, table, JSON and page."""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kfcomm.bench.pages import measured as page
from kfcomm.bench.report import COLUMNS, Files, Progress, Report, ReportTable, Watch
from kfcomm.bench.suite import Begun, BenchResult, Event, Failed, MeasuredCase, Starting, Suite, from_line, to_line
from kfcomm.errors import ConfigError
from kfcomm.types import Verb

SUITE = Suite(
    (Verb.ALL_REDUCE, Verb.BROADCAST),
    sizes=(1 << 10, 1 << 15, 1 << 20),
    workloads=("resnet50",),
    strategies=("ring", "star"),
)
HOST = {
    "ranks": (0, 1),
    "hostname": "<script>alert(1)</script>",
    "processor": "A & B",
    "cores": 4,
    "usable_cores": 2,
    "memory_nbytes": 8 << 30,
    "system": "Linux",
    "versions": {"kfcomm": "1", "uvloop": None},
}


def results(suite: Suite = SUITE) -> list[BenchResult]:
    """Invented results: a microsecond and a nanosecond per byte, and one time in ten is twice as long."""
    return [
        BenchResult(
            case, 2, tuple((1e-6 + 1e-9 * case.nbytes) * (2 if number % 10 == 9 else 1) for number in range(20))
        )
        for case in suite.cases(2)
    ]


def report(suite: Suite = SUITE) -> Report:
    made = Report(suite)
    made.note(Begun(2, len(suite.cases(2)), (HOST,)))
    for result in results(suite):
        made.note(MeasuredCase(result))
    return made


@pytest.mark.parametrize(
    "event",
    [
        Begun(2, 9, ({"ranks": [0, 1], "hostname": "a\nb"},)),
        Starting(SUITE.cases(2)[0]),
        *map(MeasuredCase, results()),
        Failed("wrong result: é\n"),
    ],
)
def test_events_survive_the_way_through_a_pipe(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    assert from_line(line) == event


@pytest.mark.parametrize("line", ["", "hello", '{"a": 1}', "[1]"])
def test_other_lines_are_no_events(line: str) -> None:
    assert from_line(line) is None


def test_the_table_says_once_what_is_the_same_everywhere() -> None:
    table = ReportTable.of(results(Suite(sizes=(1 << 10, 1 << 20), iterations=20)), COLUMNS)
    settings = {"op": "sum", "dtype": "float32", "strategy": "auto", "transport": "auto", "iterations": "20"}
    assert dict(table.common) == {"collective": "all_reduce", **settings}
    assert [column.title for column in table.columns] == ["size", "p50", "p99", "algbw", "busbw"]
    assert table.as_text().splitlines()[1:] == [
        " size    p50    p99  algbw  busbw",
        "          µs     µs   GB/s   GB/s",
        "1 KiB  2.024  4.048  0.506  0.506",
        "1 MiB   1050   2099  0.999  0.999",
    ]


def test_the_table_has_a_column_for_what_differs() -> None:
    titles = [column.title for column in ReportTable.of(results(), COLUMNS).columns]
    assert titles[:5] == ["collective", "mode", "op", "strategy", "size"]


def test_json_has_machine_settings_and_every_time() -> None:
    data = json.loads(json.dumps(report().as_json()))
    assert (data["ranks"], data["hosts"][0]["cores"], data["suite"]["strategies"]) == (2, 4, ["ring", "star"])
    assert len(data["results"]) == len(SUITE.cases(2))
    first = data["results"][0]
    assert (first["collective"], first["nbytes"], first["strategy"], first["correct"]) == (
        "all_reduce",
        1024,
        "ring",
        True,
    )
    assert (len(first["times_s"]), first["p50_s"], first["p99_s"]) == (20, *map(pytest.approx, (2.024e-6, 4.048e-6)))


class Page(HTMLParser):
    """Collects ids, references, texts and tags; checks that tags are closed in order."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.tags: Counter[str] = Counter()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)

    def note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            elif name in ("href", "src", "xlink:href"):
                self.references.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_is_whole_small_and_needs_nothing_else() -> None:
    text = page(report())
    found = Page(text)
    assert len(text) < 1 << 20
    assert found.tags["svg"] == 3
    assert not found.tags.keys() & {"script", "link", "img", "iframe"}
    assert set(found.ids.values()) == {1}
    data = [one for one in found.references if one.startswith("data:application/json;base64,")]
    assert json.loads(base64.b64decode(data[0].partition(",")[2]))["ranks"] == 2
    assert len(data) == 1
    assert {one.removeprefix("#") for one in found.references if one not in data} <= found.ids.keys()
    assert {one for group in re.findall(r"url\((.*?)\)", text) for one in [group.removeprefix("#")]} <= found.ids.keys()
    assert "@import" not in text


def test_the_page_has_units_labels_and_the_table() -> None:
    texts = Page(page(report())).texts
    words = ("busbw", "algbw", "size of the message", "ring", "star", "1 KiB", "resnet50")
    assert set(words) <= set(texts)
    assert any(re.fullmatch(r"\d+ MB/s", text) for text in texts)
    assert any(re.fullmatch(r"\d+ µs", text) for text in texts)
    assert any(text.startswith("A & B, 2 of 4 cores") for text in texts)
    assert {"1.03 ms", "2.02 µs", "1.05 ms", "999 MB/s"} & set(texts)
    headline = next(text for text in texts if text.startswith("all_reduce of 1 MiB takes 1.05 ms (999 MB/s busbw)"))
    assert "broadcast of 1 MiB takes" in headline
    assert "resnet50 of 97.6 MiB takes" in headline
    assert HOST["hostname"] in texts  # as text: it was escaped


@pytest.mark.parametrize(
    "suite",
    [
        Suite(sizes=(4,)),
        Suite(sizes=(4, 8), dtypes=("float32", "int8"), strategies=("ring", "star", "tree", "clique", "auto")),
        Suite((), workloads=("vgg16", "bert-base")),
    ],
)
def test_small_and_large_suites_make_a_page(suite: Suite) -> None:
    Page(page(report(suite)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream, (result, *_) = Terminal(), results()
    progress = Progress(stream)
    progress.show(Begun(2, 4, ()))
    progress.show(Starting(result.case))
    progress.show(MeasuredCase(result))
    progress.show(Starting(result.case))
    progress.say("something else")
    progress.close()
    *shown, last = stream.getvalue().split("\r\x1b[K")
    assert last == ""
    assert "1/4" in shown[1]
    assert "2/4" in shown[2]
    assert all(len(line) < 60 for text in shown for line in text.splitlines())
    assert shown[3].startswith("something else\n")


def test_progress_elsewhere_is_a_line_for_each_case() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for result in results():
        progress.show(Starting(result.case))
        progress.show(MeasuredCase(result))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(results())
    assert lines[0].startswith(
        "all_reduce of 1 KiB (sum), float32, strategy ring, transport auto: p50 2.024 µs, p99 4.048 µs"
    )


def test_files_are_tried_before_and_left_as_they_were(tmp_path: Path) -> None:
    kept = tmp_path / "old.json"
    kept.write_text("old")
    Files(kept, tmp_path / "new.html").check()
    assert kept.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    Files(kept, tmp_path / "new.html").write(report())
    assert json.loads(kept.read_text())["ranks"] == 2
    Page((tmp_path / "new.html").read_text("utf-8"))


@pytest.mark.parametrize("name", ["missing/x.json", "."])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    for files in (Files(json=tmp_path / name), Files(html=tmp_path / name)):
        with pytest.raises(ConfigError, match="cannot be written"):
            files.check()
    with pytest.raises(ConfigError, match="cannot be written"):
        Files(json=tmp_path / name).write(report())


def test_without_what_draws_only_the_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.bench.report.is_installed", lambda _: False)
    Files(json=tmp_path / "x.json").check()
    with pytest.raises(ConfigError, match=r"kfcomm\[bench\]"):
        Files(html=tmp_path / "x.html").check()


def test_a_wrong_result_is_told_at_once_with_what_was_measured_before(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that ends by it may make the launcher end this process before it comes to its end."""
    watch = Watch(Report(SUITE), Files())
    watch.note(Begun(2, 4, ()))
    for result in results():
        watch.note(MeasuredCase(result))
    watch.note(Failed("wrong result of all_reduce"))
    told = capsys.readouterr()
    assert "kfcomm: error: wrong result of all_reduce" in told.err
    assert "1 KiB" in told.out
    assert watch.finish(0) == 1
    assert capsys.readouterr() == ("", "")
