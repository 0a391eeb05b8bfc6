"""Variables of ``torch.distributed`` (``env://``) for the ranks of a job, as torchrun sets them.

Variables of the user stay; those of an enclosing launcher (torchrun, or another ``kfcomm run``) describe its ranks, not
these, and are replaced. kfcomm itself reads ``KFCOMM_*`` first, and never uses these variables in such a job.

In an elastic job rank and size change while a process lives, which a group of torch cannot follow. So only
``LOCAL_RANK`` is set there, for the choice of a device, and ``env://`` fails at once for lack of ``RANK``.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterator, Mapping
from random import Random

from kfcomm.errors import ConfigError
from kfcomm.launch.hosts import Plan

LOCAL_RANK = "LOCAL_RANK"
NAMES = ("RANK", "WORLD_SIZE", LOCAL_RANK, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
KEY = "torch/port"
"""Key of the store for the port of rank 0 of torch's group, chosen by the first launcher."""

_OTHERS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
"""Further variables of torchrun."""
_TORCHRUN, _KFCOMM = "TORCHELASTIC_", "KFCOMM_JOB"
_PORTS = range(20000, 29500)
"""Below Linux's ports for clients, and the defaults of torch and kfcomm."""


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment without variables that an enclosing launcher has set for torch."""
    if _KFCOMM not in environ and not any(name.startswith(_TORCHRUN) for name in environ):
        return dict(environ)
    foreign = {*NAMES, *_OTHERS}
    return {name: value for name, value in environ.items() if not (name in foreign or name.startswith(_TORCHRUN))}


def variables(plan: Plan, rank: int, local: tuple[int, int], port: int | None) -> dict[str, str]:
    """Variables to set for a rank, unless the user has set them.

    Args:
        plan: hosts and their initial ranks.
        rank: in the world.
        local: rank and number of ranks on its host.
        port: for rank 0; None if the job is elastic.
    """
    found = {LOCAL_RANK: str(local[0])}
    if port is not None:
        whole = (rank, plan.size, *local, plan.hosts[0].address, port)
        found = dict(zip(NAMES, map(str, whole), strict=True))
    return found


def contradictions(environ: Mapping[str, str], plan: Plan) -> Iterator[str]:
    """Warnings about variables of the user that do not fit these ranks."""
    kept = inherited(environ)
    if plan.size > 1 and "RANK" in kept:
        yield f"RANK={kept['RANK']} is kept for all {plan.size} ranks, since it is set: unset it for torch.distributed"
    if kept.get("WORLD_SIZE", str(plan.size)) != str(plan.size):
        yield f"WORLD_SIZE={kept['WORLD_SIZE']} is kept, since it is set, and this job has {plan.size} ranks"


def free_port(mark: str, taken: Collection[int]) -> int:
    """A free port of this host; jobs that start at the same time get different ones.

    Raises:
        ConfigError: no port is free.
    """
    for port in Random(mark).sample(_PORTS, len(_PORTS)):
        if port not in taken and all(_is_free(family, port) for family in (socket.AF_INET, socket.AF_INET6)):
            return port
    raise ConfigError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free for MASTER_PORT: set it")


def _is_free(family: int, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # a host may lack one of the families
    return True
