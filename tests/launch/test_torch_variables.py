"""Variables that `kfcomm run` sets for ``torch.distributed``: ``env://`` finds the ranks in any environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

from kfcomm.launch.hosts import HostPlan, LaunchHost
from kfcomm.launch.job import TORCH_NAMES, contradictions, free_port, inherited, torch_variables
from tests.launch.launched import command, environ

SHOW = (
    f"import json, os; print(json.dumps({{name: os.environ[name] for name in {TORCH_NAMES!r} if name in os.environ}}))"
)
TWO_HOSTS = ("127.0.0.1", "127.0.0.2")


def shown(*arguments: str, env: Mapping[str, str] | None = None, program: str = SHOW) -> list[dict[str, str]]:
    """Environment of each rank of a job, by rank."""
    done = subprocess.run(
        command("run", *arguments, sys.executable, "-c", program), env=env or environ(), capture_output=True,
        text=True, stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return found_in(done.stdout)


def found_in(text: str) -> list[dict[str, str]]:
    return [json.loads(line) for _, line in sorted(re.findall(r"^\[ *(\d+)\] (\{.*\})$", text, re.MULTILINE))]


def test_each_rank_finds_its_place_and_one_free_port() -> None:
    found = shown("-n", "2")
    port = found[0]["MASTER_PORT"]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    assert found == [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(2)]
    assert 1024 < int(port) < 29500


def test_variables_of_the_user_are_kept() -> None:
    found = shown("-n", "2", env=environ(MASTER_ADDR="localhost", MASTER_PORT="12345"))
    assert [(one["RANK"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found] == [
        (rank, "localhost", "12345") for rank in ("0", "1")
    ]


def test_warns_of_invalid_variables_of_the_user() -> None:
    plan = HostPlan.single(2)
    assert list(contradictions({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, plan)) == []
    assert ["RANK=1 is kept" in line or "this job has 2 ranks" in line for line in contradictions(
        {"RANK": "1", "WORLD_SIZE": "3"}, plan
    )] == [True, True]  # fmt: skip
    assert list(contradictions({"RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}, plan)) == []


def test_ranks_of_an_elastic_job_are_promised_no_number() -> None:
    assert shown("-n", "2", "--elastic", "1:3") == [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}]


def test_a_launcher_inside_another_speaks_of_its_own_ranks() -> None:
    inner = [*command("run", "-n", "2"), sys.executable, "-c", SHOW]
    program = f"import subprocess, sys; sys.exit(subprocess.call({inner!r}))"
    done = subprocess.run(
        command("run", "-n", "2", sys.executable, "-c", program), env=environ(), capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in re.findall(r"\] (\{.*\})$", done.stdout, re.MULTILINE)]
    assert sorted((one["MASTER_PORT"], one["RANK"]) for one in found) == sorted(
        (port, rank) for port in {one["MASTER_PORT"] for one in found} for rank in ("0", "1")
    )
    assert len({one["MASTER_PORT"] for one in found}) == 2
    assert {one["WORLD_SIZE"] for one in found} == {"2"}


def test_variables_of_an_outer_torchrun_are_replaced() -> None:
    around = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "1",
    }  # fmt: skip
    assert inherited({**around, "HOME": "/"}) == {"HOME": "/"}
    assert inherited({"RANK": "3", "HOME": "/"}) == {"RANK": "3", "HOME": "/"}
    found = shown("-n", "2", env=environ(**around))
    assert [(one["RANK"], one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in found] == [
        (rank, "2", "127.0.0.1") for rank in ("0", "1")
    ]
    assert "29500" not in {one["MASTER_PORT"] for one in found}


def test_on_several_hosts_the_first_one_is_the_place_to_meet() -> None:
    plan = HostPlan((LaunchHost("10.0.0.1", 2), LaunchHost("10.0.0.2", 1)), 1)
    assert torch_variables(plan, 2, (0, 1), 20001) == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20001",
    }  # fmt: skip


def test_a_port_that_is_taken_is_left_out() -> None:
    port = free_port("mark", ())
    assert free_port("mark", ()) == port
    assert free_port("mark", {port}) != port
