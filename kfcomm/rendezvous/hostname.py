"""The name of this host, fit for messages and for the wire, whatever somebody has set it to."""

from __future__ import annotations

import socket

NAMELESS = "(no name)"


def hostname() -> str:
    """The name: printable, of 1 to 255 characters; each character that is not shows as ``?``."""
    name = socket.gethostname()[:255]  # bytes that are no UTF-8 come as surrogates, which are not printable
    return "".join(one if one.isprintable() else "?" for one in name) or NAMELESS
