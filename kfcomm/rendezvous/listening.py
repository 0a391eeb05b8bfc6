"""Socket of a store, opened before the store serves, so that ranks can be started early.

Early connections wait in the socket's queue (listen(2)).
"""

from __future__ import annotations

import os
import socket

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.settings import store_url

BACKLOG = 4096
"""Length of the queue: all ranks of a host connect at once. The kernel may allow fewer."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at ``host`` (an IP address) and ``port`` (0: any that is free).

    Raises:
        RendezvousError: the port is in use, or the address is not this host's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RendezvousError(
            f"the store cannot listen at {store_url(host, port)}: {os.strerror(error.errno or 0)}; "
            "another port can be set with KFCOMM_PORT, or --port of kfcomm run"
        ) from error


def url_of(listener: socket.socket) -> str:
    """``http://address:port`` of a listening store."""
    host, port = listener.getsockname()[:2]
    return store_url(host, port)
