import os

import pytest

from kfcomm.launch.explain import explain
from tests.launch.launched import TOKEN, command, environ, finished


def test_alone() -> None:
    text, code = explain({})
    assert code == 0
    assert "alone" in text
    assert "0 of 1" in text
    assert "127.0.0.1  <- chosen" in text


def test_a_launched_rank() -> None:
    done = finished("run", "-n", "2", *command("env"))
    assert done.returncode == 0, done
    assert "[1]   rank        1 of 2" in done.stdout
    assert "(served by the launcher)" in done.stdout


def test_the_reasons_are_told_and_the_token_is_not() -> None:
    text, code = explain(
        {"KFCOMM_RANK": "1", "KFCOMM_SIZE": "2", "KFCOMM_STORE": "http://127.0.0.1:5", "KFCOMM_TOKEN": TOKEN}
    )
    assert code == 0
    assert "KFCOMM_RANK=1, KFCOMM_SIZE=2" in text
    assert "token: KFCOMM_TOKEN" in text
    assert TOKEN not in text


def test_what_cannot_work_is_told_with_the_rest() -> None:
    text, code = explain({"KFCOMM_RANK": "1"})
    assert code == 2
    assert "KFCOMM_SIZE is not" in text
    assert "interfaces" in text


def test_an_interface_that_does_not_exist() -> None:
    text, code = explain({"KFCOMM_INTERFACE": "no-such-interface"})
    assert code == 2
    assert "no-such-interface" in text


def test_links_and_versions_are_listed() -> None:
    text, _ = explain({})
    for word in ("tcp ", "unix", "numpy", "python", "protocol"):
        assert word in text


def row(text: str, name: str) -> str:
    """What stands after this name."""
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.split(None, 1)[1]


def test_what_auto_takes_within_a_host_is_told() -> None:
    text, _ = explain({})
    assert row(text, "transport") == "auto: shared memory within a host, TCP between hosts"
    assert row(text, "shm") == "yes  between processes of one host, through memory of both"


def test_why_memory_cannot_be_shared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    reason = "this system has no memfd_create"
    text, code = explain({})
    assert code == 0
    assert row(text, "transport") == f"auto: Unix sockets ({reason}) within a host, TCP between hosts"
    assert row(text, "shm") == f"no   {reason}"
    text, code = explain({"KFCOMM_TRANSPORT": "shm"})
    assert code == 2
    assert row(text, "transport") == f"shm: cannot work ({reason}); use auto"
    assert row(explain({"KFCOMM_TRANSPORT": "tcp"})[0], "transport") == "tcp"


def test_columns_are_aligned() -> None:
    rows = explain({})[0].split("\n\n")[0].splitlines()[1:]
    assert [row[:14] for row in rows] == [f"  {row[2:12].strip():10}  " for row in rows]


def test_as_a_command() -> None:
    done = finished("env", env=environ(KFCOMM_TRANSPORT="pigeon"))
    assert done.returncode == 2
    assert "KFCOMM_TRANSPORT='pigeon'" in done.stdout
    assert finished("env").returncode == 0
