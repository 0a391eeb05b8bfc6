"""Store in etcd (3.4 or later), through its JSON gateway, at an address like ``etcd://user@h1,h2:2379,h3/prefix``.

``etcds`` secures the connections with TLS, by the system's authorities or ``?ca=FILE``, and shows
``cert=FILE&key=FILE`` if given. The password is in the variable ``KFCOMM_ETCD_PASSWORD``, or in the URL, where other
users of the host can see it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.backends import Backend, LocalStore, Opening

SCHEMES = {"etcd": "http", "etcds": "https"}
DEFAULT_PORT = 2379
MAX_PREFIX_LENGTH = 128
PASSWORD = "KFCOMM_ETCD_PASSWORD"
EXAMPLE = "etcd://10.0.0.1,10.0.0.2,10.0.0.3/prefix"
HOW = f"it looks like {EXAMPLE}, or etcds://... for TLS"

_ENDPOINT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """An etcd, and the prefix of one job in it.

    ``endpoints`` are the ``http://host:port`` of its members; all keys of the job begin with ``prefix`` and a slash.
    """

    endpoints: tuple[str, ...]
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        hosts = ",".join(one.partition("://")[2] for one in self.endpoints)
        who = f"{self.user}@" if self.user else ""
        return f"{'etcd' if self.tls is None else 'etcds'}://{who}{hosts}/{self.prefix}"


def parse(store: str, environ: Mapping[str, str]) -> Address:
    """Parse an address.

    Raises:
        ConfigError: it is malformed, or a file of TLS cannot be used. Does not show the password.
    """
    parts = urlsplit(store)
    who, _, hosts = parts.netloc.rpartition("@")
    user, _, password = who.partition(":")
    shown = store.replace(f":{password}@", ":...@") if password else store
    found = [_ENDPOINT.fullmatch(one) for one in hosts.split(",")]
    if parts.scheme not in SCHEMES or not all(found) or parts.fragment:
        raise ConfigError(f"--store {shown!r} names no etcd: {HOW}")
    ports = [int(one[2] or DEFAULT_PORT) for one in found if one is not None]
    if not all(0 < port < 1 << 16 for port in ports):
        raise ConfigError(f"--store {shown!r}: expected a port from 1 to 65535")
    prefix = parts.path.strip("/")
    if not prefix or len(prefix) > MAX_PREFIX_LENGTH or not prefix.isprintable():
        raise ConfigError(f"--store {shown!r} needs a prefix for the keys of this job: {HOW}")
    names = [one[1] for one in found if one is not None]
    endpoints = tuple(f"{SCHEMES[parts.scheme]}://{name}:{port}" for name, port in zip(names, ports, strict=True))
    password = unquote(password) or environ.get(PASSWORD, "")
    if user and not password:
        raise ConfigError(f"--store {shown!r} names a user: set {PASSWORD} to the password")
    return Address(endpoints, prefix, unquote(user), password, _tls(shown, parts.scheme, parts.query))


def _tls(shown: str, scheme: str, query: str) -> ssl.SSLContext | None:
    files = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(files.keys() - {"ca", "cert", "key"}):
        raise ConfigError(f"--store {shown!r}: expected ca, cert and key, got {', '.join(unknown)}")
    if scheme == "etcd":
        if files:
            raise ConfigError(f"--store {shown!r} names files for TLS: write etcds://")
        return None
    if ("cert" in files) != ("key" in files):
        raise ConfigError(f"--store {shown!r}: expected both cert and key, got one")
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files["key"])
    except OSError as error:  # SSLError is one
        raise ConfigError(f"--store {shown!r}: TLS cannot be used: {error.strerror or error}") from error
    return context


async def _open(address: str, opening: Opening) -> LocalStore:
    from kfcomm.rendezvous.backends.etcd.mirror import EtcdStore  # and the library of HTTP

    found = parse(address, opening.environ)
    return await EtcdStore.begin(found, is_first=opening.is_first, within_s=opening.within_s)


BACKEND = Backend(tuple(SCHEMES), EXAMPLE, _open, is_shared=True, secrets=(PASSWORD,))
