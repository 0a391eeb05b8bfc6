"""Registry of finders: how each launcher tells a process its place in the world.

To add a launcher, write a module like `slurm` with a function ``find`` and add its line to `FINDERS`. The module is
imported only where one of its signs is seen; ``find`` is pure but for files that variables name::

    def find(environ: Environ) -> Outcome: ...      the world, or its lack, see `worlds`

The first world counts, by the order of the registry: launchers run inside each other, and the innermost describes the
process itself. Two worlds of one layer that differ are an error. So are incomplete variables without a world: a
process never begins a world of one for lack of a variable.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Protocol, cast

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.worlds import KFCOMM, Absent, Environ, FoundWorld, Incomplete, Outcome

ASK_FOR_ONE = "for a world of one, pass size=1 or set KFCOMM_SIZE=1"
_MAX_SHOWN = 6


class Layer(IntEnum):
    """Kinds of launchers, the innermost first."""

    OWN = auto()
    INITIALIZED = auto()
    """The program itself has told its library of its place."""
    TORCH = auto()
    WORKERS = auto()
    """Their workers inherit the variables of what started the cluster."""
    MPI = auto()
    """They start their daemons by the tasks of a scheduler, whose variables describe the daemons."""
    TASKS = auto()
    PODS = auto()
    ALLOCATIONS = auto()


class FinderModule(Protocol):
    """Functions of a module that implements a finder."""

    def find(self, environ: Environ) -> Outcome:
        """Return the world, or the reason for its lack. Raises `ConfigError`: its variables contradict each other."""


@dataclass(frozen=True, slots=True)
class Finder:
    """One launcher.

    Attributes:
        name: of the module, and the source in messages.
        layer: its kind.
        title: its name in sentences.
        signs: variables that show its presence; ``VC_*`` matches by its beginning.
        library: module of Python that shows its presence once it is imported; empty for none.
    """

    name: str
    layer: Layer
    title: str
    signs: tuple[str, ...]
    library: str = ""

    def seen(self, environ: Environ) -> list[str]:
        """Signs that are there."""
        found = [sign for sign in self.signs if sign in environ]
        for sign in self.signs:
            if sign.endswith("*"):
                found += sorted(name for name in environ if name.startswith(sign[:-1]) and name not in found)
        return found

    def outcome(self, environ: Environ) -> Outcome | ConfigError:
        """Return what it finds; an error is returned, since another finder may come first."""
        if not self.seen(environ) and (not self.library or self.library not in sys.modules):
            return Absent(f"{' and '.join(self.signs[:2])} are not set" if self.signs else "not imported")
        try:
            return cast("FinderModule", importlib.import_module(f"{__name__}.{self.name}")).find(environ)
        except ConfigError as error:
            return error


FINDERS = (
    Finder(KFCOMM, Layer.OWN, "kfcomm run, or by hand", ("KFCOMM_RANK", "KFCOMM_SIZE")),
    Finder("jax", Layer.INITIALIZED, "jax.distributed", (), "jax"),
    Finder("torchrun", Layer.TORCH, "torchrun", ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")),
    Finder("ray", Layer.WORKERS, "Ray", (), "ray"),
    Finder("dask", Layer.WORKERS, "Dask", (), "distributed"),
    Finder("openmpi", Layer.MPI, "Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    Finder("hydra", Layer.MPI, "MPICH's and Intel MPI's hydra", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    Finder("flux", Layer.TASKS, "Flux", ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_JOB_ID", "FLUX_URI")),
    Finder("pals", Layer.TASKS, "HPE PALS", ("PALS_RANKID", "PALS_APID")),
    Finder("slurm", Layer.TASKS, "SLURM", ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID")),
    Finder("pmi", Layer.TASKS, "PMI", ("PMI_RANK", "PMI_SIZE")),
    Finder("pmix", Layer.TASKS, "PMIx", ("PMIX_RANK", "PMIX_NAMESPACE")),
    Finder("trainer", Layer.PODS, "Kubeflow Trainer", ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR")),
    Finder("leaderworkerset", Layer.PODS, "LeaderWorkerSet", ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_*")),
    Finder("volcano", Layer.PODS, "Volcano", ("VC_TASK_INDEX", "VC_*")),
    Finder("jobset", Layer.PODS, "JobSet", ("JOBSET_JOB_GLOBAL_INDEX", "JOBSET_GLOBAL_REPLICAS")),
    Finder("kubernetes", Layer.PODS, "Kubernetes Indexed Job", ("JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST")),
    Finder("pbs", Layer.ALLOCATIONS, "PBS", ("PBS_NODEFILE", "PBS_JOBID")),
    Finder("lsf", Layer.ALLOCATIONS, "LSF", ("LSB_MCPU_HOSTS", "LSB_JOBID")),
)  # fmt: skip
"""In order of precedence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one finder in an environment; an error counts only if no finder before it finds a world."""

    finder: Finder
    outcome: Outcome | ConfigError
    seen: tuple[str, ...]  # signs that are there

    def describe(self, chosen: FoundWorld | None) -> str:
        """Why it was taken or left, and what it saw; ``chosen`` is the world that counts, if any."""
        match self.outcome:
            case FoundWorld() as world if world is chosen:
                return f"taken: rank {world.rank} of {world.size} ({world.because})"
            case FoundWorld() as world:
                before = f"; {chosen.source} comes first" if chosen is not None else ""
                return f"left: rank {world.rank} of {world.size} ({world.because}){before}"
            case Absent(why):
                seen = [name for name in self.seen if name not in why][:_MAX_SHOWN]
                return f"left: {why}" + (f" (saw {', '.join(seen)})" if seen else "")
            case Incomplete(why, remedy):
                return f"incomplete: {why}: {remedy}"
            case error:
                return f"invalid: {error}"


def survey(environ: Environ) -> list[Finding]:
    """Findings of all finders, by precedence. An empty variable counts as unset."""
    environ = {name: value for name, value in environ.items() if value}
    return [Finding(finder, finder.outcome(environ), tuple(finder.seen(environ))) for finder in FINDERS]


def choose(findings: Sequence[Finding]) -> FoundWorld | None:
    """The world that counts; None if no launcher's variables are there.

    Raises:
        ConfigError: variables are invalid or incomplete, or two launchers of one layer contradict each other.
    """
    for finding in findings:
        if isinstance(finding.outcome, ConfigError):
            raise finding.outcome
        if isinstance(finding.outcome, FoundWorld):
            _check_layer(finding, findings)
            return finding.outcome
    lacking = [
        f"{finding.finder.title}: {why}: {remedy}"
        for finding in findings
        if isinstance(finding.outcome, Incomplete)
        for why, remedy in ((finding.outcome.why, finding.outcome.remedy),)
    ]
    if lacking:
        raise ConfigError(f"the place of this process in its world is unknown. {'. '.join(lacking)}; {ASK_FOR_ONE}")
    return None


def _check_layer(chosen: Finding, findings: Sequence[Finding]) -> None:
    """Refuse two worlds of one layer that differ."""
    for other in findings:
        one, two = chosen.outcome, other.outcome
        if other.finder.layer is not chosen.finder.layer or not isinstance(one, FoundWorld):
            continue
        if isinstance(two, FoundWorld) and (one.rank, one.size) != (two.rank, two.size):
            sides = (f"{world.source} says rank {world.rank} of {world.size} ({world.because})" for world in (one, two))
            raise ConfigError(
                f"two launchers contradict each other: {', '.join(sides)}; unset the variables of one, "
                "or set KFCOMM_RANK and KFCOMM_SIZE"
            )
