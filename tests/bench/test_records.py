"""The description of the machine."""

import json
from pathlib import Path

from bench.records import commit, describe


def test_processor_and_memory_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU: fast\nmodel name\t: other\n")
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemTotal:       25165824 kB\n")
    record = describe(tmp_path)
    assert (record["cpu"], record["memory_GiB"]) == ("Some CPU: fast", 24.0)


def test_a_machine_is_described(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.50 0.25 1.00 2/300 4711\n")
    record = describe(tmp_path)
    assert record["load_average_before"] == [0.5, 0.25, 1.0]
    assert record["cores"] >= 1
    assert record["cpu"] == record["architecture"]
    assert json.loads(json.dumps(record)) == record


def test_outside_of_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
