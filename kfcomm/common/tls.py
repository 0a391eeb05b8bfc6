"""TLS 1.3 of a job: what its processes prove to each other, and how to make it.

All processes of a job show a certificate that its own authority has signed, and ask for one (mutual TLS). A certificate
says that a process belongs to the job, not which one it is: that is proven inside, by the token. So names in
certificates are not looked at, and one certificate can do for all hosts.
"""

from __future__ import annotations

import datetime
import logging
import os
import ssl
from pathlib import Path
from typing import NamedTuple

from kfcomm.common.extras import lacking
from kfcomm.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "cert.pem", "key.pem", "ca.pem"
"""Files in a folder that `make` has made."""
DAYS = 30

_HOW = "it is a folder made by 'kfcomm tls make', or CERT,KEY,CA: three files"

logger = logging.getLogger("kfcomm")


class Tls(NamedTuple):
    """TLS contexts of a process.

    Attributes:
        client: for those that this process opens.
        server: for those that it accepts.
    """

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

    The authority's key is not kept, so that no other certificate can be signed.

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
    contents = {
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
