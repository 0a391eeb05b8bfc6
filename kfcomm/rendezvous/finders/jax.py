"""Processes of ``jax.distributed``: a program that has called ``jax.distributed.initialize`` has a place."""

from __future__ import annotations

import sys
from typing import Any

from kfcomm.rendezvous.worlds import Absent, Environ, FoundWorld, Incomplete, Outcome, beside, store_port


def find(environ: Environ) -> Outcome:
    """Find the world; its store is at the port after that of JAX's coordinator."""
    jax = sys.modules["jax"]
    if not hasattr(jax, "distributed"):
        return Absent("the module jax is not JAX")
    # JAX says its address nowhere else.
    state: Any = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is None:
        return Absent("JAX is imported, and jax.distributed is not initialized")
    rank, size = state.process_id, state.num_processes
    because = f"process {rank} of {size} of jax.distributed"
    if size == 1:
        return FoundWorld("jax", rank, size, None, None, because)
    host, _, port = str(getattr(state, "coordinator_address", None) or "").rpartition(":")
    if not host or not port.isdecimal():
        why = f"{because}, whose coordinator's address this JAX does not tell"
        return Incomplete(why, "pass rank, size, store and token")
    store = host.strip("[]"), store_port(environ, beside(int(port)))
    return FoundWorld("jax", rank, size, None, store, f"{because}, coordinator {host}:{port}")
