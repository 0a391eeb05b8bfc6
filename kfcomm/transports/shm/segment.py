"""Anonymous shared memory: made by one process, passed as a descriptor, mapped by both.

Invariants: a segment never changes its size. It is sealed when it is made, and the seals of a peer's segment are
checked before it is mapped: a segment that shrank under a mapping would kill its reader with SIGBUS (memfd_create(2)).
It has no name on disk or below /dev/shm, so a crash leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import sys

from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.base import LinkRefused

_ORDERED_STORES = frozenset({"x86_64", "AMD64"})

if sys.platform == "linux":
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def why_unsupported() -> str | None:
    """Return why this process cannot share memory, or None.

    Other processors than x86 may show a peer the counter of a record before the record itself, and plain Python has no
    ordered store; 32-bit processors may show half a word.
    """
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    if not hasattr(socket, "send_fds"):
        return "descriptors cannot be passed over sockets here"
    if platform.machine() not in _ORDERED_STORES:
        return f"stores are not ordered on {platform.machine()}"
    if sys.maxsize < 1 << 32:
        return "a 64-bit Python is needed"
    try:
        os.close(make("kfcomm-probe", mmap.PAGESIZE))
    except OSError as error:
        return f"memfd_create does not work here: {error.strerror}"
    return None


def create(name: str, nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a segment; returns its descriptor, which the caller closes, and its mapping.

    Raises:
        LinkRefused: the system refuses the memory.
    """
    try:
        descriptor = make(name, nbytes)
        try:
            return descriptor, mmap.mmap(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise LinkRefused(f"cannot share {nbytes} bytes of memory: {error.strerror}") from error


def attach(descriptor: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """Map a peer's segment of ``nbytes``; the descriptor stays the caller's.

    Raises:
        RemoteProtocolError: see ``check``.
        TransportError: it cannot be mapped.
    """
    check(descriptor, nbytes)
    try:
        return mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except OSError as error:
        raise TransportError(f"cannot map {nbytes} bytes of a peer's memory: {error.strerror}") from error


def check(descriptor: int, nbytes: int) -> None:
    """Check that a descriptor is a sealed segment of ``nbytes``.

    Raises:
        RemoteProtocolError: it is not a segment of that size, or could still change its size.
    """
    size = size_of(descriptor)
    if size != nbytes:
        raise RemoteProtocolError(f"shared memory of {size} bytes where {nbytes} were announced")


def size_of(descriptor: int) -> int:
    """Return the bytes of a segment.

    Raises:
        RemoteProtocolError: not a segment, or it could still change its size.
    """
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise RemoteProtocolError(f"expected a shared-memory descriptor: {error.strerror}") from error
    if sealed & _SEALS != _SEALS or size < 1:
        raise RemoteProtocolError(f"shared memory of {size} bytes, seals {sealed:#x}, which could change its size")
    return size


def make(name: str, nbytes: int) -> int:
    """Make a segment; returns its descriptor.

    Raises:
        OSError: the system refuses the memory.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
