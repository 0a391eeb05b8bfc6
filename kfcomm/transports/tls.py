"""TLS 1.3 of a job: its certificates, and TCP sockets inside TLS with the interface of plain ones.

All processes of a job show a certificate that its own authority has signed, and ask for one (mutual TLS). A certificate
says that a process belongs to the job, not which one it is: that is proven inside, by the token. So names in
certificates are not looked at, and one certificate can do for all hosts.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kfcomm.common.imports import lacking
from kfcomm.common.sockets import readable, writable
from kfcomm.errors import ConfigError
from kfcomm.transports.sockets import closed_on_failure

CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"
"""Files in a folder that `make` has made."""
DAYS = 30

_HOW = "it is a folder made by 'kfcomm tls make', or CERT,KEY,CA: three files"

logger = logging.getLogger("kfcomm")


class Tls(NamedTuple):
    """TLS contexts of a process, for connections that it opens and for those that it accepts."""

    client: ssl.SSLContext
    server: ssl.SSLContext


def load(given: str) -> Tls:
    """The contexts of a folder that `make` has made, or of ``CERT,KEY,CA``, three files in PEM.

    Raises:
        ConfigError: a file is missing or unreadable, or the key is not the certificate's; names it.
    """
    paths = [Path(part) for part in given.split(",")] if "," in given else _in_folder(Path(given))
    if len(paths) != 3:
        raise ConfigError(f"tls={given!r} names {len(paths)} files: {_HOW}")
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"tls={given!r}: file {path} does not exist; {_HOW}")
    certificate, key, authority = paths
    if key.stat().st_mode & 0o077:
        logger.warning("%s, a private key, can be read by others than its owner: chmod 600 it", key)
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False  # see above
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # What is cut short is found by goodbyes and lengths; and else one side that ends would end the other, too.
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(authority)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"tls={given!r} cannot be used: {error.strerror or error}; {_HOW}") from error
        contexts.append(context)
    client, server = contexts
    server.num_tickets = 0  # nobody resumes; and what a client never reads would reset its connection in the end
    return Tls(client, server)


def _in_folder(folder: Path) -> list[Path]:
    return [folder / name for name in (CERTIFICATE, KEY, AUTHORITY)]


def make(folder: Path, *, days: int = DAYS) -> None:
    """Make an authority for one job and a certificate that it signs, into a new folder that its owner alone can read.

    Raises:
        ConfigError: the folder holds such files already, cannot be written, or the library is missing.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError:
        raise ConfigError(lacking("kfcomm tls make", "cryptography")) from None
    from cryptography.hazmat.primitives import hashes, serialization

    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, key: ec.EllipticCurvePrivateKey, issuer: str, by: ec.EllipticCurvePrivateKey) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of hosts differ
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=0 if name == issuer else None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False)
        )
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])

    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    contents = {  # without the authority's key: no other certificate can be signed
        AUTHORITY: signed("a kfcomm job's authority", authority, "a kfcomm job's authority", authority),
        CERTIFICATE: signed("a process of a kfcomm job", key, "a kfcomm job's authority", authority),
        KEY: key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in contents.items():
            _write(folder / name, content)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} is there already: take another folder, or remove it first") from error
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


PIECE_NBYTES = 1 << 16
"""Bytes encrypted by one call, four records of TLS; copied once if the socket is full."""

_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsSocket:
    """One TCP connection inside TLS, with the part of the interface of a plain socket that links and handshakes use.

    Invariants:

    - A call that can do nothing now raises ``BlockingIOError``, as that of a plain socket does.
    - Bytes that ``send`` reports as sent are on their way, and no others. If the kernel takes only a part of a piece,
      its last byte is reported as unsent: so the caller sends the rest of that frame before any other, and calls again
      as soon as the socket is writable.
    - ``recv_into`` fills the buffer with everything that has arrived. If it is full, more may be ``pending``, which
      the kernel does not signal.

    Args:
        sock: a connected non-blocking TCP socket, which belongs to this object from now on.
        context: of this side.
        is_server: which side this is.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        self.family = sock.family
        self._sock = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        self._unsent: bytes | None = None

    async def shake_hands(self) -> None:
        """The handshake of TLS. Raises `OSError`: it failed."""
        while True:
            try:
                return self._sock.do_handshake()
            except ssl.SSLWantReadError:
                await readable(self.fileno())
            except ssl.SSLWantWriteError:
                await writable(self.fileno())

    def send(self, data: Any) -> int:
        """Send as much of ``data``, which is not empty, as the socket takes; returns bytes sent, see the module."""
        moved = 0
        if self._unsent is not None:
            try:
                self._sock.send(self._unsent)
            except _NOT_NOW:
                raise BlockingIOError from None
            self._unsent = None
            moved = 1
        view = memoryview(data)
        while moved < len(view):
            piece = view[moved : moved + PIECE_NBYTES]
            try:
                self._sock.send(piece)
            except _NOT_NOW:
                self._unsent = bytes(piece)  # to be offered again, byte for byte
                return moved + len(piece) - 1
            moved += len(piece)
        return moved

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        """Send several buffers; small ones share a record."""
        moved = 0
        for data in _joined(buffers):
            moved += self.send(data)
            if self._unsent is not None:
                break
        return moved

    def recv_into(self, buffer: Any) -> int:
        """Receive as much as has arrived and fits; returns 0 at the end."""
        view = memoryview(buffer)
        moved = 0
        while moved < len(view):
            try:
                got = self._sock.recv_into(view[moved:])
            except _NOT_NOW:
                if not moved:
                    raise BlockingIOError from None
                break
            if not got:
                break
            moved += got
        return moved

    def recvmsg_into(self, buffers: Sequence[Any]) -> tuple[int]:
        """Receive into several buffers in turn; of the result of ``socket.recvmsg_into`` only the number is used."""
        moved = 0
        for buffer in buffers:
            try:
                got = self.recv_into(buffer)
            except BlockingIOError:
                if not moved:
                    raise
                break
            moved += got
            if got < len(buffer):
                break
        return (moved,)

    def pending(self) -> int:
        """Return the bytes that are decrypted and not received."""
        return self._sock.pending()

    def shutdown(self, how: int) -> None:
        """Shut down the connection below; the last frame marks the end for TLS users."""
        socket.socket.shutdown(self._sock, how)

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._sock.fileno()

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        """Return an option of the connection below."""
        return self._sock.getsockopt(level, option, nbytes)

    def setblocking(self, flag: bool) -> None:
        """Check that the socket stays non-blocking."""
        if flag:
            raise ValueError("a socket inside TLS does not block")

    def setsockopt(self, *arguments: Any) -> None:
        """Set an option of the connection below."""
        self._sock.setsockopt(*arguments)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


async def secured(sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> TlsSocket:
    """Return the same connection inside TLS; closed on failure.

    Raises:
        OSError: the other side does not use TLS, or its certificate is not of this job.
    """
    with closed_on_failure(sock):
        inside = TlsSocket(sock, context, is_server=is_server)
    try:
        await inside.shake_hands()
    except BaseException:
        inside.close()
        raise
    return inside


def _joined(buffers: Sequence[Any]) -> Iterator[Any]:
    """Yield the same bytes in fewer buffers: a head joins the beginning of its payload."""
    small: list[Any] = []
    for buffer in filter(len, buffers):
        if len(buffer) >= PIECE_NBYTES:
            if small:
                yield b"".join(small)
                small = []
            yield buffer
        else:
            small.append(buffer)
    if small:
        yield b"".join(small)
