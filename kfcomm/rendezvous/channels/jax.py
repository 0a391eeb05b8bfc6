"""The key-value store that JAX's coordinator serves to the processes of ``jax.distributed``.

It is as secret as JAX's own exchange: who can reach the coordinator's port can read the token there; rank 0 says so
once. The first proposal counts: a program may join several worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.channels import Handing
from kfcomm.rendezvous.worlds import Environ

TITLE = "jax.distributed"
SOURCE = "jax"
KEY = "kfcomm/token"

logger = logging.getLogger("kfcomm")


def why_absent(environ: Environ, source: str) -> str:
    """Return the reason why this process has no coordinator; empty if it has one."""
    del environ  # JAX keeps it to itself
    return "" if source == SOURCE else "it is not initialized in this process"


async def agree(handing: Handing) -> tuple[bytes, bytes]:
    """Propose a token (rank 0), and get the one that counts."""
    state: Any = sys.modules["jax._src.distributed"].global_state
    if handing.rank == 0:
        logger.warning(
            "no KFCOMM_TOKEN is set: the token is kept by JAX's coordinator, where all who reach %s can read it",
            state.coordinator_address,
        )
    return await asyncio.to_thread(_agreed, state.client, handing), b""


def _agreed(client: Any, handing: Handing) -> bytes:
    if handing.rank == 0:
        with contextlib.suppress(RuntimeError):  # it was proposed before
            client.key_value_set(KEY, handing.propose().decode())
    try:
        return str(client.blocking_key_value_get(KEY, int(1e3 * handing.timeout_s))).encode()
    except RuntimeError as error:
        raise RendezvousError(f"JAX's coordinator does not hand a token over: {error}") from error
