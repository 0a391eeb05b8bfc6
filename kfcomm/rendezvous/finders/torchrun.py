"""The variables of torchrun, which torch's ``env://`` also reads; PyTorchJob and Ray Train set them too."""

from __future__ import annotations

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.worlds import (
    Environ,
    FoundWorld,
    Incomplete,
    Outcome,
    both,
    lacking,
    pair,
    port_beside,
    quote,
    store_port,
)


def find(environ: Environ) -> Outcome:
    """Find the world; its store is at the port after ``MASTER_PORT``, where torch's own is."""
    names = ("RANK", "WORLD_SIZE")
    if why := lacking(environ, names, "TORCHELASTIC_RUN_ID"):
        return Incomplete(why, "set both or neither")
    rank, size = both(environ, *names)
    local = pair(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    store = None
    if size > 1:
        if not environ.get("MASTER_ADDR"):
            raise ConfigError("torchrun: RANK and WORLD_SIZE are set but MASTER_ADDR is not")
        store = environ["MASTER_ADDR"], _port(environ)
    return FoundWorld("torchrun", rank, size, local, store, quote(environ, *names, "MASTER_ADDR"))


def _port(environ: Environ) -> int:
    if "KFCOMM_PORT" in environ:
        return store_port(environ, 0)
    if "MASTER_PORT" not in environ:
        raise ConfigError("torchrun: MASTER_PORT is not set; set it, or KFCOMM_PORT to the port of kfcomm's own store")
    return port_beside(environ, "MASTER_PORT")
