"""The store that torchrun's agent serves at ``MASTER_ADDR`` and ``MASTER_PORT``.

It is as secret as the processes of torch that use it: who can reach its port can read the token there. Gloo and NCCL
have no secret at all, so a program is not less safe than with them; rank 0 says so once. All ranks propose a token, and
the first one counts: the agent's store outlives restarts of its workers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from datetime import timedelta

from kfcomm.common.imports import is_installed
from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.channels import Handing
from kfcomm.rendezvous.worlds import Environ, integer

TITLE = SOURCE = "torchrun"
KEY = "kfcomm/token"

logger = logging.getLogger("kfcomm")


def why_absent(environ: Environ, source: str) -> str:
    """Return the reason why no agent's store can be used; empty if one can."""
    if source != SOURCE:
        return "it has not started this process"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return "its agent serves no store"
    return "" if is_installed("torch") else "torch is not installed"


async def agree(handing: Handing) -> tuple[bytes, bytes]:
    """Propose a token in the agent's store; the first proposal counts."""
    host, port = handing.environ["MASTER_ADDR"], integer(handing.environ, "MASTER_PORT", 1, 65535)
    if handing.rank == 0:
        logger.warning(
            "no KFCOMM_TOKEN is set: the token is kept in torchrun's store, where all who reach %s:%d can read it",
            host, port,
        )  # fmt: skip
    return await asyncio.to_thread(_agreed, host, port, handing.timeout_s), b""


def _agreed(host: str, port: int, timeout_s: float) -> bytes:
    from torch.distributed import TCPStore

    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        return bytes(store.compare_set(KEY, "", secrets.token_hex(32)))
    except RuntimeError as error:
        raise RendezvousError(f"torchrun's store at {host}:{port} does not answer: {error}") from error
