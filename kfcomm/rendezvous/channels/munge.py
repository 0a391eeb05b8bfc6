"""Credentials of munge, which authenticates the users of most SLURM clusters.

Rank 0 seals the token in a credential that only processes of the same user can open, on hosts with the same munge key;
its store shows it to everyone. What is opened names the user who sealed it: a credential of anyone else is refused. So
neither another user nor one who sits at the store's port learns the token, or makes the ranks use one of theirs.

A credential that is old, or was opened before, is accepted: each rank opens it, and it may join late. It gives no one a
token that they did not know.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.authentication import HOW_TO_SET
from kfcomm.rendezvous.channels import Handing

TITLE = "munge"
LIBRARY = "libmunge.so.2"
SOCKET = "/run/munge/munge.socket.2"
CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Of SLURM, where ``SLURM_CONF`` names none: a cluster may have a munge of its own."""

# munge.h
_OPTION_CIPHER, _OPTION_SOCKET, _OPTION_UID = 0, 8, 9
_AES128 = 4
_EXPIRED, _REWOUND, _REPLAYED = 15, 16, 17
_OPENED = (0, _EXPIRED, _REWOUND, _REPLAYED)


def why_absent(environ: Mapping[str, str], source: str) -> str:
    """Return the reason why this process cannot use munge; empty if it can."""
    del source  # of any launcher
    socket = _socket(environ)
    if not Path(socket).is_socket():
        return f"no daemon listens at {socket}"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return f"{LIBRARY} is not installed"
    return ""


async def agree(handing: Handing) -> tuple[bytes, bytes]:
    """Seal the token for the store to show (rank 0), or open what it shows (the others)."""
    munge = _Munge(_socket(handing.environ))
    if handing.rank == 0:
        return await asyncio.to_thread(_sealed, munge, handing)
    shown = await handing.look()
    if not shown:
        raise RendezvousError(
            f"the store at {handing.store} hands no token over, perhaps since rank 0 was given one: {HOW_TO_SET}"
        )
    return await asyncio.to_thread(_opened, munge, shown, handing), b""


def _sealed(munge: _Munge, handing: Handing) -> tuple[bytes, bytes]:
    token = handing.propose()
    return token, munge.seal(_heading(handing) + token, munge.own_uid())


def _opened(munge: _Munge, sealed: bytes, handing: Handing) -> bytes:
    own = munge.own_uid()
    text, uid = munge.open(sealed)
    heading = _heading(handing)
    if uid != own:
        raise RendezvousError(
            f"the store at {handing.store} belongs to the user {uid}, not to this one ({own}): if another job has the "
            "port, set KFCOMM_PORT"
        )
    if not text.startswith(heading):
        raise RendezvousError(f"the store at {handing.store} shows a credential that is not for this store")
    return text[len(heading) :]


def _heading(handing: Handing) -> bytes:
    """Purpose, so that no other credential of the user is taken for a token."""
    return f"kfcomm token of the store at {handing.store}\n".encode()


def _socket(environ: Mapping[str, str]) -> str:
    """The daemon's socket: SLURM's own where its configuration names one."""
    for path in filter(None, (environ.get("SLURM_CONF"), *CONFIGURATIONS)):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        named = re.search(r"^\s*AuthInfo\s*=.*?\bsocket=([^\s,]+)", text, re.IGNORECASE | re.MULTILINE)
        return named[1] if named else SOCKET
    return SOCKET


@dataclass(frozen=True, slots=True)
class _Munge:
    """The daemon at a socket, by its library."""

    socket: str

    def seal(self, text: bytes, uid: int | None = None) -> bytes:
        """Make a credential that this user, or any, can open."""
        library, sealed = _library(), ctypes.c_char_p()
        context = self._context(library)
        try:
            library.munge_ctx_set(context, _OPTION_CIPHER, _AES128)
            if uid is not None:
                library.munge_ctx_set(context, _OPTION_UID, ctypes.c_uint(uid))
            code = library.munge_encode(ctypes.byref(sealed), context, text, len(text))
            if code:
                raise self._failed("seals no credential", library, context)
            return bytes(sealed.value or b"")
        finally:
            _free(sealed)
            library.munge_ctx_destroy(context)

    def open(self, sealed: bytes) -> tuple[bytes, int]:
        """Return the text of a credential, and the user who sealed it."""
        library, buffer, length, uid = _library(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
        context = self._context(library)
        try:
            code = library.munge_decode(
                sealed, context, ctypes.byref(buffer), ctypes.byref(length), ctypes.byref(uid), None
            )
            if code not in _OPENED:
                raise self._failed("does not open the credential of rank 0", library, context)
            return ctypes.string_at(buffer, length.value), uid.value
        finally:
            _free(buffer)
            library.munge_ctx_destroy(context)

    def own_uid(self) -> int:
        """This user, as the daemon knows it: in a container ``os.getuid`` may tell another number."""
        return self.open(self.seal(b""))[1]

    def _context(self, library: ctypes.CDLL) -> ctypes.c_void_p:
        context = ctypes.c_void_p(library.munge_ctx_create())
        library.munge_ctx_set(context, _OPTION_SOCKET, ctypes.c_char_p(os.fsencode(self.socket)))
        return context

    def _failed(self, what: str, library: ctypes.CDLL, context: ctypes.c_void_p) -> RendezvousError:
        why = (library.munge_ctx_strerror(context) or b"").decode(errors="replace")
        return RendezvousError(f"munge at {self.socket} {what}: {why}; {HOW_TO_SET}")


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_strerror.restype = ctypes.c_char_p
    library.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    return library


def _free(pointer: Any) -> None:
    ctypes.CDLL(None).free(pointer)
