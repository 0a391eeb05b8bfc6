"""Detection as a table: an environment, and the place in the world that it gives."""

import re
from pathlib import Path

import pytest

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.host import host_and_port, store_url
from kfcomm.rendezvous.settings import Settings, detect, misspelt
from kfcomm.transports.registry import TRANSPORT_NAMES

TOKEN = "a token that is long enough"
STORE = "http://10.0.0.1:29600"

KFCOMM = {"KFCOMM_RANK": "1", "KFCOMM_SIZE": "4", "KFCOMM_STORE": STORE, "KFCOMM_TOKEN": TOKEN}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "29500",
    "KFCOMM_TOKEN": TOKEN,
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[07-08,11]",
    "SLURM_JOB_ID": "4711",
    "KFCOMM_TOKEN": TOKEN,
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "123456@1",
    "KFCOMM_TOKEN": TOKEN,
}
PMI = {
    "PMI_RANK": "0",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "KFCOMM_TOKEN": TOKEN,
}


def place(settings: Settings) -> tuple[str, int, int, int, int]:
    return settings.source, settings.rank, settings.size, settings.local_rank, settings.local_size


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("alone", 0, 1, 0, 1)),
        (KFCOMM, ("kfcomm", 1, 4, 0, 1)),
        (KFCOMM | {"KFCOMM_LOCAL_RANK": "1", "KFCOMM_LOCAL_SIZE": "2"}, ("kfcomm", 1, 4, 1, 2)),
        (KFCOMM | {"KFCOMM_STORE": "http://127.0.0.1:5"}, ("kfcomm", 1, 4, 1, 4)),
        (KFCOMM | {"KFCOMM_RANK": "0", "KFCOMM_SIZE": "1"}, ("kfcomm", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        (SLURM, ("slurm", 3, 5, 1, 2)),
        (OPENMPI, ("openmpi", 2, 4, 2, 4)),
        (PMI, ("hydra", 0, 2, 0, 2)),
        # each hides those after it
        (SLURM | TORCHRUN, ("torchrun", 5, 8, 1, 4)),
        (PMI | OPENMPI | SLURM | TORCHRUN | KFCOMM, ("kfcomm", 1, 4, 0, 1)),
        # mpirun below srun describes the process, SLURM its daemon
        (SLURM | OPENMPI, ("openmpi", 2, 4, 2, 4)),
        (SLURM | PMI, ("hydra", 0, 2, 0, 2)),
        ({"KFCOMM_SIZE": "1"} | SLURM, ("kfcomm", 0, 1, 0, 1)),
    ],
)
def test_place_in_the_world(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert place(detect(environ)) == expected


@pytest.mark.parametrize("choice", ["auto", "none", "cuda", "cuda:0", "cuda:15"])
def test_a_device_is_chosen(choice: str) -> None:
    assert detect({"KFCOMM_DEVICE": choice}).device == choice
    assert detect({"KFCOMM_DEVICE": "none"}, device=choice).device == choice
    assert detect({"KFCOMM_DEVICE": ""}).device == "auto"


@pytest.mark.parametrize(
    "choice", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1.5", "cuda:²", "cuda0", "auto:1", "cuda:99999"]
)
def test_invalid_device_is_refused(choice: str) -> None:
    expected = re.escape(f"KFCOMM_DEVICE={choice!r} must be auto, none, cuda, or cuda:N")
    with pytest.raises(ConfigError, match=expected):
        detect({"KFCOMM_DEVICE": choice})
    with pytest.raises(ConfigError, match=r"^device="):
        detect({}, device=choice)
    with pytest.raises(ConfigError, match="device=0 must be a text"):
        detect({}, device=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", TRANSPORT_NAMES)
def test_transports_of_devices_leave_the_links_as_they_are(transport: str) -> None:
    settings = detect({"KFCOMM_TRANSPORT": transport})
    assert settings.transport == transport
    assert settings.links == ("auto" if transport in ("nccl", "ipc") else transport)


def test_arguments_come_first() -> None:
    settings = detect(TORCHRUN | KFCOMM, rank=0, size=2, store="http://10.0.0.3:99", strategy="ring", timeout=5)
    assert place(settings) == ("arguments", 0, 2, 0, 1)
    assert (settings.store, settings.strategy, settings.timeout_s) == ("http://10.0.0.3:99", "ring", 5.0)
    assert settings.serve


@pytest.mark.parametrize(
    ("environ", "store"),
    [
        (TORCHRUN, "http://10.0.0.9:29501"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, "http://10.0.0.9:65534"),
        (TORCHRUN | {"KFCOMM_PORT": "1234"}, "http://10.0.0.9:1234"),
        (TORCHRUN | {"KFCOMM_STORE": STORE}, STORE),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "http://127.0.0.1:29501"),
        (TORCHRUN | {"MASTER_ADDR": "localhost"}, "http://127.0.0.1:29501"),
        (SLURM | {"KFCOMM_PORT": "1234"}, "http://node07:1234"),
        (OPENMPI | {"KFCOMM_PORT": "1234"}, "http://127.0.0.1:1234"),
        (PMI, "http://127.0.0.1:29600"),
    ],
)
def test_url_of_the_store(environ: dict[str, str], store: str) -> None:
    assert detect(environ).store == store


@pytest.mark.parametrize("environ", [SLURM, OPENMPI])
def test_the_port_made_from_the_job_is_the_same_for_all_its_ranks(environ: dict[str, str]) -> None:
    ranks = {name: "0" for name in environ if name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")}
    one, other = detect(environ), detect(environ | ranks)
    assert one.rank != other.rank
    assert one.store == other.store
    assert one.store is not None
    assert 20000 <= host_and_port(one.store)[1] < 30000


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"KFCOMM_RANK": "1"}, ["KFCOMM_RANK='1'", "KFCOMM_SIZE is not"]),
        ({"KFCOMM_SIZE": "2"}, ["KFCOMM_SIZE=2", "KFCOMM_RANK is not"]),
        (TORCHRUN | {"KFCOMM_SIZE": "4"}, ["KFCOMM_SIZE=4, but torchrun has 8 ranks (RANK=5, WORLD_SIZE=8"]),
        (PMI | OPENMPI, ["openmpi says rank 2 of 4", "hydra says rank 0 of 2", "unset the variables of one"]),
        (KFCOMM | {"KFCOMM_RANK": "4"}, ["KFCOMM_RANK='4'", "from 0 to 3"]),
        (KFCOMM | {"KFCOMM_RANK": "one"}, ["KFCOMM_RANK='one'", "integer"]),
        (KFCOMM | {"KFCOMM_RANK": "1" * 5000}, ["KFCOMM_RANK=", "integer"]),
        (KFCOMM | {"KFCOMM_SIZE": "0"}, ["KFCOMM_SIZE='0'", "from 1"]),
        (KFCOMM | {"KFCOMM_LOCAL_RANK": "0", "KFCOMM_LOCAL_SIZE": "5"}, ["local size 5", "size 4"]),
        (KFCOMM | {"KFCOMM_STORE": "10.0.0.1:29600"}, ["KFCOMM_STORE=", "http://"]),
        (KFCOMM | {"KFCOMM_STORE": "http://10.0.0.1"}, ["KFCOMM_STORE=", "http://"]),
        (KFCOMM | {"KFCOMM_STORE": "http://10.0.0.1:70000"}, ["KFCOMM_STORE=", "http://"]),
        (KFCOMM | {"KFCOMM_STORE": ""}, ["KFCOMM_STORE"]),
        ({"KFCOMM_STORE": STORE}, ["KFCOMM_STORE", "rank and size"]),
        (KFCOMM | {"KFCOMM_TRANSPORT": "carrier pigeon"}, ["KFCOMM_TRANSPORT='carrier pigeon'", "tcp"]),
        (KFCOMM | {"KFCOMM_TIMEOUT": "0"}, ["KFCOMM_TIMEOUT='0'", "seconds"]),
        (KFCOMM | {"KFCOMM_TIMEOUT": "nan"}, ["KFCOMM_TIMEOUT='nan'"]),
        (KFCOMM | {"KFCOMM_STALL_AFTER": "soon"}, ["KFCOMM_STALL_AFTER='soon'"]),
        (KFCOMM | {"KFCOMM_SERVE": "perhaps"}, ["KFCOMM_SERVE='perhaps'", "0 or 1"]),
        (KFCOMM | {"KFCOMM_STRATEGY": "\x1b[2J"}, ["KFCOMM_STRATEGY="]),
        (KFCOMM | {"KFCOMM_TOKEN": "short"}, ["KFCOMM_TOKEN", "5 characters"]),
        (KFCOMM | {"KFCOMM_TOKEN": ""}, ["several hosts", "KFCOMM_TOKEN"]),
        (KFCOMM | {"KFCOMM_TOKEN_FILE": "/x"}, ["KFCOMM_TOKEN and KFCOMM_TOKEN_FILE"]),
        ({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}, ["MASTER_ADDR"]),
        ({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}, ["MASTER_PORT", "KFCOMM_PORT"]),
        (TORCHRUN | {"KFCOMM_PORT": "0"}, ["KFCOMM_PORT='0'"]),
        (SLURM | {"SLURM_STEP_NODELIST": "node[1"}, ["SLURM_STEP_NODELIST='node[1'"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "many"}, ["SLURM_STEP_TASKS_PER_NODE='many'"]),
        (SLURM | {"SLURM_NODEID": "9"}, ["SLURM_NODEID='9'", "from 0 to 2"]),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, ["openmpi", "KFCOMM_STORE"]),
    ],
)
def test_invalid_setting_is_named_with_what_is_allowed(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 1}, ["size is missing"]),
        ({"size": 2}, ["rank is missing"]),
        ({"rank": 2, "size": 2}, ["rank 2"]),
        ({"rank": True, "size": 2}, ["rank=True"]),
        ({"rank": 0, "size": 2}, ["KFCOMM_STORE"]),
        ({"timeout": -1}, ["timeout=-1"]),
        ({"colour": "red"}, ["colour", "strategy"]),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect({}, **arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_a_world_on_one_host_needs_no_token_to_be_set(tmp_path: Path) -> None:
    environ = {**OPENMPI, "XDG_RUNTIME_DIR": str(tmp_path)}
    del environ["KFCOMM_TOKEN"]
    assert detect(environ).token == detect(environ | {"OMPI_COMM_WORLD_RANK": "0"}).token is not None


def test_size_of_one_is_a_world_of_one_whatever_the_environment_says() -> None:
    assert place(detect(TORCHRUN, size=1)) == ("arguments", 0, 1, 0, 1)


def test_the_reasons_name_the_world_but_never_the_token() -> None:
    text = "\n".join(detect(TORCHRUN).reasons)
    assert "torchrun: rank 5 of 8" in text
    assert "KFCOMM_TOKEN" in text
    assert TOKEN not in text


def test_only_a_launcher_says_that_the_store_runs() -> None:
    assert detect(KFCOMM).serve
    assert not detect(KFCOMM | {"KFCOMM_SERVE": "0"}).serve
    assert not detect({}).serve


def test_ipv6_urls() -> None:
    assert host_and_port(store_url("fd00::1", 5)) == ("fd00::1", 5)
    assert detect(KFCOMM | {"KFCOMM_STORE": "http://[fd00::1]:5/"}).store == "http://[fd00::1]:5"


@pytest.mark.parametrize(
    "names", [("KFCOMM_SIZE", "KFCOMM_RANK"), ("RANK", "WORLD_SIZE", "MASTER_ADDR"), ("PMI_RANK",)]
)
def test_an_empty_variable_is_as_good_as_none(names: tuple[str, ...]) -> None:
    assert detect(dict.fromkeys(names, "")) == detect({})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KFCOMM_TRANSPROT", "KFCOMM_TRANSPORT"),
        ("KFCOMM_STAL_AFTER", "KFCOMM_STALL_AFTER"),
        ("KFCOMM_TIME_OUT", "KFCOMM_TIMEOUT"),
        ("KFCOMM_TOKENFILE", "KFCOMM_TOKEN_FILE"),
    ],
)
def test_a_misspelt_variable_is_told_with_what_was_meant(name: str, meant: str) -> None:
    assert misspelt({name: "x", meant: "y", "HOME": "/"}) == [
        f"{name} is an unknown setting and has no effect: did you mean {meant}?"
    ]


def test_variables_of_somebody_else_are_left_alone() -> None:
    assert misspelt({"KFCOMM_MY_OWN_THING": "x", "KFCOM_TRANSPORT": "x", "KFCOMM_RANK": "0", "KFCOMM_JOB": "j"}) == []
