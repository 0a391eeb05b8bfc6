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


def test_columns_are_aligned() -> None:
    rows = explain({})[0].split("\n\n")[0].splitlines()[1:]
    assert [row[:14] for row in rows] == [f"  {row[2:12].strip():10}  " for row in rows]


def test_as_a_command() -> None:
    done = finished("env", env=environ(KFCOMM_TRANSPORT="pigeon"))
    assert done.returncode == 2
    assert "KFCOMM_TRANSPORT='pigeon'" in done.stdout
    assert finished("env").returncode == 0
