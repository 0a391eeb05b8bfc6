"""Suggestions and aliases for commands, options, values, settings and names of calls."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import kfcomm
from kfcomm.cli import main
from kfcomm.common.arguments import hint, meant
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.settings import detect, misspelt

WORDS = ("auto", "tcp", "unix", "shm", "nccl", "all-reduce", "binary_tree")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tpc", "tcp"), ("TCP", "tcp"), ("uinx", "unix"), ("all_reduce", "all-reduce"), ("allreduce", "all-reduce"),
        ("binary-tre", "binary_tree"), (" tcp ", "tcp"), ("binary", "binary_tree"),
    ],
)  # fmt: skip
def test_the_likeliest_word_comes_first(wrong: str, right: str) -> None:
    assert meant(wrong, WORDS)[0] == right
    assert hint(wrong, WORDS).startswith(f"; did you mean {right!r}")


@pytest.mark.parametrize("wrong", ["", "x", "pigeon", "0", "ooooooooooooooo" * 1000])
def test_for_what_is_like_nothing_nothing_is_suggested(wrong: str) -> None:
    assert hint(wrong, WORDS) == ""


@given(st.text(max_size=50) | st.integers() | st.none())
def test_anything_may_be_wrong(wrong: object) -> None:
    assert set(meant(wrong, WORDS)) <= set(WORDS)


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        ("rnu -n 2 true", "Did you mean kfcomm run?"),
        ("tpo", "Did you mean kfcomm top?"),
        ("simulte", "Did you mean kfcomm simulate?"),
        ("strategies", "Did you mean kfcomm topology list?"),
        ("topology ring -n 4", "Did you mean kfcomm topology show ring -n 4?"),
        ("topology shwo ring", "Did you mean kfcomm topology show?"),
        ("topology draw ring", "Did you mean kfcomm topology show?"),
        ("tls mkae x", "Did you mean kfcomm tls make?"),
        ("timeline sumary x", "Did you mean kfcomm timeline summary?"),
        ("run --stratgy ring -n 2 true", "--strategy"),
        ("run -n 2 --transport tcpp true", "did you mean 'tcp'?"),
        ("run -n 2 --device cdua true", "did you mean 'cuda'?"),
        ("run -n 2 --strategy rign true", "did you mean ring?"),
        ("run -n 2 --strategy ring,star true", "only one is wanted here"),
        ("probe -n 2 --transport uinx", "did you mean 'unix'?"),
        ("bench al-reduce -n 2", "did you mean 'all-reduce'"),
        ("bench topologis -n 2", "did you mean kfcomm bench topologies?"),
        ("bench -n 2 --op smu", "did you mean 'sum'"),
        ("bench -n 2 --dtype flaot32", "did you mean 'float32'?"),
        ("bench -n 2 --workload resnet", "did you mean 'resnet50'?"),
        ("bench -n 2 --strategy rnig", "did you mean ring?"),
        ("bench -n 2 --strategy ring:star", "strategies have commas between them: ring,star"),
        ("simulate --strategy ring:star", "strategies have commas between them: ring,star"),
        ("bench topologies --simulate 2x2 --strategy ring:star", "strategies have commas between them: ring,star"),
    ],
)
def test_commands_suggest(arguments: str, suggestion: str) -> None:
    done = CliRunner().invoke(main, arguments.split(), prog_name="kfcomm", terminal_width=300)
    assert done.exit_code == 2
    assert suggestion in done.output
    assert done.output.splitlines()[-1].startswith("kfcomm: error: ")


def test_a_command_that_is_like_none_gets_no_suggestion() -> None:
    done = CliRunner().invoke(main, ["frobnicate"])
    assert (done.exit_code, "Did you mean" in done.output) == (2, False)


@pytest.mark.parametrize(
    ("arguments", "as_elsewhere", "said"),
    [
        ("topology show ring -n 4", "topology show --strategy ring -n 4", "--strategy is an argument"),
        ("topology show ring -n 4", "topology show --strategy=ring -n 4", "--strategy is an argument"),
        ("topology show auto -n 4 --nbytes 64", "topology show auto -n 4 --size 64", "--size is --nbytes here"),
        ("simulate --strategy star --hosts 2x1 --sizes 1KiB", "simulate --strategy star --hosts 2x1 --size 1KiB",
         "--size is --sizes here"),
        ("bench topologies --simulate 2x1 --strategy star --sizes 1KiB",
         "bench topologies --simulate 2x1 --strategy star --nbytes=1KiB", "--nbytes is --sizes here"),
    ],
)  # fmt: skip
def test_option_names_of_other_commands_are_accepted_with_a_note(arguments: str, as_elsewhere: str, said: str) -> None:
    plain, done = (CliRunner().invoke(main, one.split()) for one in (arguments, as_elsewhere))
    assert (plain.exit_code, done.exit_code) == (0, 0), done.output
    assert done.stdout == plain.stdout
    assert f"kfcomm: {said}" in done.stderr
    assert " here" not in plain.stderr


@pytest.mark.parametrize(
    ("name", "value", "suggestion"),
    [("transport", "tcpp", "tcp"), ("traceback", "fulll", "full"), ("device", "cdua", "cuda")],
)
def test_settings_suggest(name: str, value: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='{value}' .*; did you mean '{suggestion}'\?$"):
        detect({}, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"^KFCOMM_{name.upper()}='{value}' .*; did you mean '{suggestion}'\?$"):
        detect({f"KFCOMM_{name.upper()}": value})


def test_names_of_settings_suggest() -> None:
    with pytest.raises(ConfigError, match=r"^unknown settings trnasport; .*; did you mean 'transport'"):
        detect({}, trnasport="tcp")  # type: ignore[call-arg]
    assert misspelt({"KFCOMM_TRNASPORT": "tcp"}) == [
        "KFCOMM_TRNASPORT is an unknown setting and has no effect: did you mean KFCOMM_TRANSPORT?"
    ]
    assert misspelt({"KFCOMM_": "x"}) == []


@pytest.mark.parametrize(("op", "suggestion"), [("smu", "sum"), ("agv", "avg"), ("maximun", "maximum")])
def test_ops_of_calls_suggest(op: str, suggestion: str) -> None:
    with kfcomm.sync.init() as comm, pytest.raises(ConfigError, match=rf"op '{op}' is unknown.*mean '{suggestion}'"):
        comm.all_reduce(np.ones(3), op=op)


def test_wire_dtypes_of_calls_suggest() -> None:
    with kfcomm.sync.init() as comm, pytest.raises(ConfigError, match=r"'bfloat61' is unknown.*mean 'bfloat16'"):
        comm.all_reduce(np.ones(3, np.float32), wire_dtype="bfloat61")
