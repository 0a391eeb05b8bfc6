"""Jobs of a real SLURM on two nodes, which share nothing but a folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import slurms
from tests.launch.launched import ROOT
from tests.slurms import Slurm

pytestmark = pytest.mark.netns

TRAINING = str(Path(__file__).with_name("training_until_asked.py"))
ENDLESS = "100000"
HELLO = "import kfcomm; comm = kfcomm.sync.init(); print(comm.all_gather_object(comm.rank)); comm.close()"
ON_TWO_NODES = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurms.running(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(cluster: Slurm) -> Iterator[Slurm]:
    """The cluster, without a job before and after the test."""
    yield cluster
    cluster.output("scancel", "--full", "--user=root")
    cluster.until(lambda: not cluster.output("squeue", "-h"))
    (cluster.folder / "train.npz").unlink(missing_ok=True)


def submitted(slurm: Slurm, *command: str, options: tuple[str, ...] = ()) -> tuple[str, Path]:
    """Number of a job of four tasks, and the file of its output."""
    line = " ".join(("srun", "python", *command))
    said = slurm.output("sbatch", "--parsable", *ON_TWO_NODES, *options, f"--wrap={line}")
    return said.strip(), slurm.folder / f"slurm-{said.strip()}.out"


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def pids(said: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"rank \d of \d is (\d+)", said)]


def committed(slurm: Slurm) -> int:
    """Number of steps in the checkpoint; 0 without one."""
    path = slurm.folder / "train.npz"
    return int(np.load(path)["used"].sum()) // 4 if path.exists() else 0


def test_tasks_of_two_nodes_need_no_token(slurm: Slurm) -> None:
    process = slurm.command("srun", "-N", "2", "-n", "4", "python", "-c", HELLO)
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert said.splitlines() == ["[0, 1, 2, 3]"] * 4


def test_programs_of_one_step_follow_each_other(slurm: Slurm) -> None:
    twice = f"python -c '{HELLO}'; python -c '{HELLO}'"
    said = slurm.output("srun", *ON_TWO_NODES, "sh", "-c", twice)
    assert said.splitlines() == ["[0, 1, 2, 3]"] * 8


def test_task_explains_where_the_token_comes_from(slurm: Slurm) -> None:
    said = slurm.output("srun", *ON_TWO_NODES, "kfcomm", "env")
    assert said.count("token: rank 0 hands it over by munge") == 4


def test_survivors_of_a_killed_task_go_on(slurm: Slurm) -> None:
    process = slurm.command("srun", *ON_TWO_NODES, "--kill-on-bad-exit=0", "python", TRAINING, "2", "2")
    said, errors = process.communicate()
    # The samples of the dead rank may have taken another step.
    assert len(re.findall(r"did steps 0 to (?:99|100), with 3 ranks at the end: used \[2\]", said)) == 3, errors
    assert "rank 2 is lost" in errors


@pytest.mark.slow
def test_signal_before_the_time_limit_ends_the_job_with_a_checkpoint(slurm: Slurm) -> None:
    options = ("--time=2", "--signal=TERM@120")
    job, output = submitted(slurm, TRAINING, ENDLESS, options=options)
    slurm.until(lambda: text(output).count("at the end") == 4)
    slurm.until(lambda: not slurm.output("squeue", "-h", "-j", job))
    assert "JobState=COMPLETED" in slurm.output("scontrol", "show", "job", job)
    [steps] = set(re.findall(r"did steps 0 to (\d+), with 4 ranks", text(output)))
    assert int(steps) - 20 <= committed(slurm) <= int(steps) + 1


@pytest.mark.slow
def test_job_of_the_documentation_is_trained_in_several_turns(slurm: Slurm) -> None:
    page = (ROOT / "docs" / "howto" / "slurm.md").read_text("utf-8")
    [script] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    (slurm.folder / "train.sh").write_text(script.replace("source ~/kf/bin/activate\n", ""))
    shutil.copy(ROOT / "deploy" / "train.py", slurm.folder)
    shorter = ("--ntasks-per-node=2", "--time=1", "--signal=TERM@60", "--export=ALL,PASSES=100")
    job = slurm.output("sbatch", "--parsable", *shorter, "train.sh").strip()
    slurm.until(lambda: "Restarts=1" in slurm.output("scontrol", "show", "job", job))
    assert (slurm.folder / "checkpoint.npz").exists()
    slurm.output("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    slurm.until(lambda: not slurm.output("squeue", "-h", "-j", job))
    assert "trained: [1.0, -2.0, 3.0]" in text(slurm.folder / f"slurm-{job}.out")
    assert (slurm.folder / "model.npy").exists()


@pytest.mark.slow
def test_requeued_job_loses_no_committed_step(slurm: Slurm) -> None:
    job, output = submitted(slurm, TRAINING, "16", options=("--requeue", "--open-mode=append"))
    slurm.until(lambda: committed(slurm) >= 40)
    kept = committed(slurm)
    slurm.output("scontrol", "requeue", job)
    slurm.until(lambda: "Requeue" in slurm.output("scontrol", "show", "job", job))
    slurm.until(lambda: len(pids(text(output))) == 8)
    slurm.until(lambda: not slurm.output("squeue", "-h", "-j", job))
    [first] = set(re.findall(r"did steps (\d+) to 799, with 4 ranks at the end: used \[16\]", text(output)))
    assert int(first) >= kept


def test_cancelled_job_leaves_nothing(slurm: Slurm) -> None:
    job, output = submitted(slurm, TRAINING, ENDLESS)
    slurm.until(lambda: committed(slurm) > 0)
    ranks = pids(text(output))
    assert len(ranks) == 4
    slurm.output("scancel", job)
    slurm.until(lambda: not slurm.output("squeue", "-h", "-j", job))
    slurm.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert os.listdir(slurm.folder / "tmp") == [f"kfcomm-{os.getuid()}"]  # the user's token on the first node
