"""Each launcher as a table: a whole environment gives the world, a part of it an error that names the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.finders import FINDERS, Finder, Layer, survey
from kfcomm.rendezvous.settings import Settings, detect

TOKEN = {"KFCOMM_TOKEN": "a token that is long enough"}
PLACE = {"KFCOMM_SIZE": "4", "KFCOMM_STORE": "http://train-0.train:29600"}

FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "f1234",
    "FLUX_URI": "local:///run/flux/local",
}
PALS = {"PALS_RANKID": "3", "PALS_APID": "d1f2", "PMI_RANK": "3", "PMI_SIZE": "4"}
PALS_ONE_HOST = PALS | {"PMI_LOCAL_RANK": "3", "PMI_LOCAL_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TRAINER = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "3",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
LWS = {"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}
VOLCANO = {"VC_TASK_INDEX": "3", "VC_WORKER_NUM": "4", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
JOBSET = {"JOBSET_JOB_GLOBAL_INDEX": "1", "JOBSET_GLOBAL_REPLICAS": "2", "JOB_COMPLETION_INDEX": "1"}
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"}
SALLOC = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 2 host2 2"}


def found(settings: Settings) -> tuple[str, int, int, str | None]:
    return settings.source, settings.rank, settings.size, settings.store


KFCOMM = {"KFCOMM_RANK": "3", "KFCOMM_SIZE": "4", "KFCOMM_STORE": "http://10.0.0.1:29600"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[04-05]",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
WORLDS: list[tuple[dict[str, str], str, str]] = [
    (KFCOMM, "kfcomm", "http://10.0.0.1:29600"),
    (TORCHRUN, "torchrun", "http://10.0.0.9:29501"),
    (SRUN | {"KFCOMM_PORT": "1234"}, "slurm", "http://n04:1234"),
    (PMI | {"SLURM_JOB_NODELIST": "n[04-05]", "KFCOMM_PORT": "1234"}, "pmi", "http://n04:1234"),
    (FLUX | {"KFCOMM_PORT": "1234"}, "flux", "http://127.0.0.1:1234"),
    (PALS_ONE_HOST | {"KFCOMM_PORT": "1234"}, "pals", "http://127.0.0.1:1234"),
    (HYDRA | {"SLURM_JOB_NODELIST": "n[04-05]", "KFCOMM_PORT": "1234"}, "hydra", "http://n04:1234"),
    (OPENMPI | {"LSB_MCPU_HOSTS": "host1 2 host2 2", "KFCOMM_PORT": "1234"}, "openmpi", "http://host1:1234"),
    ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prte@1"} | PLACE, "pmix", PLACE["KFCOMM_STORE"]),
    (TRAINER, "trainer", "http://job-node-0-0.job:29401"),
    (LWS, "leaderworkerset", "http://lws-0.lws.default:29600"),
    (VOLCANO, "volcano", "http://job-worker-0.job:29600"),
    (INDEXED_JOB | PLACE, "kubernetes", PLACE["KFCOMM_STORE"]),
    (INDEXED_JOB | JOBSET | PLACE, "jobset", PLACE["KFCOMM_STORE"]),
]
"""Variables of rank 3 of 4, the finder that takes them, and the store."""
WITHOUT_VARIABLES = {"jax", "ray", "dask", "pbs", "lsf"}
"""Finders that go by imported libraries, and engines whose variables tell no place, which is an error: see below."""


@pytest.mark.parametrize(("environ", "source", "store"), WORLDS)
def test_world_of_each_launcher(environ: dict[str, str], source: str, store: str) -> None:
    assert found(detect(environ | TOKEN)) == (source, 3, 4, store)


def test_every_launcher_has_a_row() -> None:
    assert {source for _, source, _ in WORLDS} | WITHOUT_VARIABLES == {finder.name for finder in FINDERS}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "3"}, ["RANK=3 is set but WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4 is set but RANK is not"]),
        ({"TORCHELASTIC_RUN_ID": "none"}, ["RANK and WORLD_SIZE are not"]),
        ({"OMPI_COMM_WORLD_RANK": "3"}, ["OMPI_COMM_WORLD_SIZE is not"]),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, ["MPI_LOCALRANKID=0", "PMI_RANK and PMI_SIZE are not"]),
        ({"PMI_RANK": "3"}, ["PMI_SIZE is not", "mpiexec"]),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "prte@1"}, ["PMIX_RANK=3", "set KFCOMM_SIZE"]),
        ({"PMIX_NAMESPACE": "prte@1"}, ["PMIX_RANK is not"]),
        ({"FLUX_URI": "local:///run/flux/local"}, ["FLUX_URI=", "FLUX_TASK_RANK", "flux run"]),
        ({"PALS_RANKID": "3", "PALS_APID": "d1f2"}, ["PMI_SIZE is not", "set KFCOMM_SIZE"]),
        ({"PALS_APID": "d1f2"}, ["PALS_RANKID is not", "mpiexec"]),
        (SALLOC, ["SLURM_JOB_ID=4711, SLURM_NTASKS=4", "srun"]),
        ({"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, ["SLURM_JOB_NUM_NODES=2", "srun"]),
        # the shell of salloc is a step of SLURM's own where the site has set it up so
        (
            SALLOC | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            ["SLURM_NTASKS=4", "srun"],
        ),
        (TRAINER | {"PET_NPROC_PER_NODE": "auto"}, ["PET_NPROC_PER_NODE=auto", "torchrun"]),
        (TRAINER | {"PET_NNODES": "1:4"}, ["PET_NNODES=1:4 is a range", "torchrun"]),
        ({"PET_NNODES": "4"}, ["PET_NODE_RANK is not"]),
        ({"LWS_GROUP_SIZE": "4", "LWS_LEADER_ADDRESS": "a"}, ["LWS_WORKER_INDEX is not", "worker-index"]),
        ({"VC_TASK_INDEX": "3"}, ["VC_TASK_INDEX=3", "plugin svc"]),
        ({"VC_WORKER_HOSTS": "a,b"}, ["VC_TASK_INDEX is not", "plugin env"]),
        ({"VC_TASK_INDEX": "3", "VC_WORKER_HOSTS": "a,b"}, ["VC_WORKER_NUM is not"]),
        (VOLCANO | {"VC_MASTER_HOSTS": "c"}, ["several kinds of tasks (VC_MASTER_HOSTS, VC_WORKER_HOSTS)"]),
        (INDEXED_JOB, ["JOB_COMPLETION_INDEX=3", "set KFCOMM_SIZE", "KFCOMM_STORE"]),
        (INDEXED_JOB | {"KFCOMM_SIZE": "4"}, ["kubernetes: rank 3 of 4", "KFCOMM_STORE"]),
        (JOBSET, ["KFCOMM_SIZE is not"]),
        (
            INDEXED_JOB | JOBSET | PLACE | {"KFCOMM_SIZE": "5"},
            ["KFCOMM_SIZE=5", "multiple", "JOBSET_GLOBAL_REPLICAS=2"],
        ),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "/no/such/file"}, ["PBS_NODEFILE=/no/such/file", "cannot be read"]),
        (LSF, ["LSB_MCPU_HOSTS=host1 2 host2 2", "2 hosts", "jsrun"]),
        ({"LSB_MCPU_HOSTS": "host1 two"}, ["LSB_MCPU_HOSTS='host1 two'"]),
        (HYDRA, ["hydra: rank 3 of 4", "KFCOMM_STORE"]),
    ],
)
def test_incomplete_environment_is_an_error_with_a_remedy(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(environ | TOKEN)
    for word in words:
        assert word in str(caught.value)
    asks_for_one = {name: value for name, value in environ.items() if name != "KFCOMM_STORE"} | {"KFCOMM_SIZE": "1"}
    assert found(detect(asks_for_one)) == ("kfcomm", 0, 1, None)
    assert found(detect(environ, size=1)) == ("arguments", 0, 1, None)


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"PBS_JOBID": "7"},
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "host1 4"},  # the slots of one host may be for threads
        {"VC_SOMETHING": "of another program"},
    ],
)
def test_one_place_or_a_generic_environment_is_a_world_of_one(environ: dict[str, str]) -> None:
    assert found(detect(environ)) == ("alone", 0, 1, None)


@pytest.mark.parametrize("nodes", [["node1"], ["node1", "node1"], ["node1", "node1", "node2"]])
def test_shell_of_pbs(nodes: list[str], tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("\n".join(nodes))
    environ = {"PBS_JOBID": "7", "PBS_NODEFILE": str(file)}
    if "node2" not in nodes:
        assert detect(environ).source == "alone"
        return
    with pytest.raises(ConfigError, match=r"2 nodes.*mpiexec"):
        detect(environ)
    store = detect(environ | PALS | TOKEN | {"KFCOMM_PORT": "1234"}).store
    assert store == "http://node1:1234"


@pytest.mark.parametrize("outer", [SALLOC, LSF, INDEXED_JOB, FLUX, {"RANK": "3"}])
@pytest.mark.parametrize("inner", [OPENMPI, HYDRA])
def test_launcher_inside_another_one_describes_the_process(inner: dict[str, str], outer: dict[str, str]) -> None:
    store = {"KFCOMM_STORE": "http://10.0.0.1:29600"}
    assert detect(outer | inner | TOKEN | store).source == ("openmpi" if inner is OPENMPI else "hydra")


@pytest.mark.parametrize("finder", FINDERS, ids=lambda finder: finder.name)
def test_sign_of_each_launcher_alone_is_never_a_silent_world_of_one(finder: Finder) -> None:
    generic = {"KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "VC_*", "LWS_*"}
    for sign in set(finder.signs) - generic:
        with pytest.raises(ConfigError, match=sign.partition("_")[0]):
            detect({sign: "3"})


def test_registry_is_ordered_from_the_inside() -> None:
    layers = [finder.layer for finder in FINDERS]
    assert layers == sorted(layers)
    assert layers[0] is Layer.OWN
    assert len({finder.name for finder in FINDERS}) == len(FINDERS)


def test_every_finder_says_why_it_was_left() -> None:
    for finding in survey({}):
        assert finding.describe(None).startswith("left: ")


def task_of_ray(actor: str | None, task: str | None) -> SimpleNamespace:
    context = SimpleNamespace(get_actor_id=lambda: actor, get_task_id=lambda: task)
    return SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)


def task_of_dask() -> SimpleNamespace:
    return SimpleNamespace(address="tcp://10.0.0.5:4000")


def no_task() -> SimpleNamespace:
    raise ValueError("no worker")


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}])
def test_task_of_ray_has_no_place_of_its_own(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for actor, task in (("a1", None), (None, "t1")):
        monkeypatch.setitem(sys.modules, "ray", task_of_ray(actor, task))
        with pytest.raises(ConfigError, match="Ray: a task or an actor has no rank"):
            detect(environ)
        assert detect(environ, size=1).size == 1
    for driver in (task_of_ray(None, None), SimpleNamespace(is_initialized=lambda: False)):
        monkeypatch.setitem(sys.modules, "ray", driver)
        assert detect({}).source == "alone"


def jax_distributed(monkeypatch: pytest.MonkeyPatch, coordinator: str | None, size: int = 4) -> None:
    state = SimpleNamespace(client=object(), process_id=size - 1, num_processes=size, coordinator_address=coordinator)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(distributed=None))
    monkeypatch.setitem(sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state))


def test_jax_that_is_initialized_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}
    jax_distributed(monkeypatch, "host1:1234")
    assert found(detect(TOKEN)) == found(detect(TOKEN | torchrun)) == ("jax", 3, 4, "http://host1:1235")
    assert found(detect(TOKEN | {"KFCOMM_PORT": "80"})) == ("jax", 3, 4, "http://host1:80")
    jax_distributed(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"process 3 of 4 of jax\.distributed, whose coordinator's address"):
        detect({})
    jax_distributed(monkeypatch, None, size=1)
    assert detect({}).size == 1
    monkeypatch.delitem(sys.modules, "jax._src.distributed")
    assert detect({}).source == "alone"


@pytest.mark.parametrize("name", ["ray", "distributed", "jax"])
def test_module_of_the_same_name_is_not_an_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert detect({}).source == "alone"


@pytest.mark.parametrize("get_worker", [task_of_dask, no_task])
def test_task_of_dask_has_no_place_of_its_own(
    get_worker: Callable[[], SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(get_worker=get_worker))
    if get_worker is no_task:
        assert detect({}).source == "alone"
        return
    with pytest.raises(ConfigError, match=r"Dask: a task of the worker tcp:.* has no rank"):
        detect({})
