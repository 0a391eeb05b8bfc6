"""The variables of hydra, the launcher of MPICH and Intel MPI: PMI's, and the place on the host."""

from __future__ import annotations

from kfcomm.rendezvous.finders.pmi import find_by
from kfcomm.rendezvous.worlds import Environ, Outcome


def find(environ: Environ) -> Outcome:
    """Find the world."""
    return find_by(environ, "hydra", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
