"""Token that the peers of a job share: its sources, and the signatures made with it. It never travels to the store.

A text may hold several tokens, one a line: this process signs with the first one, and accepts all. To replace a token
while jobs run, on all hosts: add the new one, then put it first, then remove the old one.

The token is given (``token=``, ``KFCOMM_TOKEN``, ``KFCOMM_TOKEN_FILE``), or, in a world on one host, it is the user's
own: random, in a directory that only this user can read, created at first use. So ranks that torchrun or mpirun started
on one machine find each other without configuration, and no other user can join them. A world on several hosts needs
a token that is given, or handed over by rank 0 (see `channels`): a derived one could be guessed.

The store draws a nonce when it starts and gives it to anyone who asks; it begins with the identity of the job, by which
a client knows a store that was started again from that of another job. A request carries the client's id, a number that
the client uses once, the digest of its body and the proof over all of these and the path, so that the server can check
it before it reads a byte of the body, and it works once. The answer is signed with the same number, so that a server
without the token cannot impersonate the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import secrets
import stat
import string
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kfcomm.core import auth
from kfcomm.errors import ConfigError

MIN_TOKEN_BITS = 128
MAX_TOKEN_NBYTES = 4096
_ALPHABETS = (
    string.digits, string.digits + "abcdef", string.digits + "ABCDEF", string.ascii_letters + string.digits,
    string.printable,
)  # fmt: skip
MIN_CHARACTERS = 6
"""Least number of distinct characters of a random token."""

logger = logging.getLogger("kfcomm")

TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
HOW_TO_SET = (
    "set KFCOMM_TOKEN to the same secret on every rank, for example once before launching: "
    'export KFCOMM_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))"), '
    "or KFCOMM_TOKEN_FILE to a file that holds it"
)


def as_text(token: bytes) -> str:
    """Token as the value of a variable."""
    return os.fsdecode(token.replace(auth.SEPARATOR, b"\n"))


def new_token() -> str:
    """A fresh token: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def given_token(environ: Mapping[str, str], argument: bytes | str | None) -> tuple[bytes, str] | None:
    """Given token and its source, or None.

    Raises:
        ConfigError: two are given, it is too short to be a secret, or the file cannot be read.
    """
    if argument is not None:
        if isinstance(argument, str):
            return _checked(argument.encode(), "token"), "token="
        return _checked(argument, "token", is_text=False), "token="
    variables = [name for name in ("KFCOMM_TOKEN", "KFCOMM_TOKEN_FILE") if environ.get(name)]
    match variables:
        case []:
            return None
        case ["KFCOMM_TOKEN"]:
            return _checked(os.fsencode(environ["KFCOMM_TOKEN"]), "KFCOMM_TOKEN"), "KFCOMM_TOKEN"
        case ["KFCOMM_TOKEN_FILE"]:
            return read_token(Path(environ["KFCOMM_TOKEN_FILE"])), "KFCOMM_TOKEN_FILE"
        case _:
            raise ConfigError("KFCOMM_TOKEN and KFCOMM_TOKEN_FILE are both set; keep one")


def read_token(path: Path) -> bytes:
    """Token in a file, without surrounding white space.

    Raises:
        ConfigError: the file cannot be read, or its token is invalid.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(MAX_TOKEN_NBYTES + 2)
    except OSError as error:
        raise ConfigError(f"token file {str(path)!r} cannot be read: {error.strerror}") from error
    if stat.S_ISREG(found.st_mode):
        _check_mode(path, stat.S_IMODE(found.st_mode))
    return _checked(text, f"token file {str(path)!r}")


def _check_mode(path: Path, mode: int) -> None:
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"token file {str(path)!r} can be written by other users (mode {mode:04o}), who could then join jobs: "
            f"chmod 600 {path}"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("token file %s can be read by others than its owner (mode %04o): chmod 600 it", path, mode)


def conceal(environ: MutableMapping[str, str], store: str, token: bytes) -> None:
    """Remove the token from the environment, since child processes must not inherit it; remember it to join again."""
    if environ.pop("KFCOMM_TOKEN", None) is not None:
        _concealed[store] = token


def concealed_token(store: str) -> tuple[bytes, str] | None:
    """Token of a job that this process has joined before."""
    token = _concealed.get(store)
    return None if token is None else (token, "the KFCOMM_TOKEN with which this process joined first")


_concealed: dict[str, bytes] = {}
"""By store. A global, as the environment that it replaces."""


def user_token(environ: Mapping[str, str]) -> tuple[bytes, str]:
    """This user's token on this host, and its file; created if missing.

    It lies in ``$XDG_RUNTIME_DIR/kfcomm``, or in ``kfcomm-UID`` of the first folder for temporary files that can be
    written: ``$TMPDIR``, ``$TEMP``, ``$TMP``, ``/tmp``, ``/var/tmp`` or ``/dev/shm``.

    Raises:
        ConfigError: the directory is not this user's alone, or none can be written.
    """
    folder = _user_folder(environ)
    return kept_token(folder), str(folder / "token")


def kept_token(folder: Path) -> bytes:
    """Token in a folder; both are created if missing.

    Raises:
        ConfigError: the folder is not this user's alone, or cannot be written.
    """
    path = folder / "token"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _make_private(folder)
        if not path.exists():
            _publish(path)
    except OSError as error:
        raise ConfigError(f"cannot keep a token in {str(folder)!r}: {error.strerror}; {HOW_TO_SET}") from error
    return read_token(path)


def _user_folder(environ: Mapping[str, str]) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "kfcomm"
    # tempfile falls back to the working directory, which may differ between ranks
    given = [(f"{name}={environ[name]}", environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    known = [*given, *((folder, folder) for folder in TEMPORARY)]
    for _, folder in known:
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder).absolute() / f"kfcomm-{os.getuid()}"
    tried = ", ".join(title for title, _ in known)
    raise ConfigError(
        f"no folder to keep this user's token in: none of {tried} can be written; {HOW_TO_SET}. Or set TMPDIR to a "
        "folder that all ranks of this host can write"
    )


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{str(folder)!r} is not a directory of this user alone (chmod 700); remove it, or {HOW_TO_SET}"
        )


def _publish(path: Path) -> None:
    """Create the token file atomically: several ranks may try, and the first wins."""
    draft = path.with_name(f"token.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token())
        with contextlib.suppress(FileExistsError):
            # A link is atomic and fails if the file exists; rename would replace the winner's token.
            path.hardlink_to(draft)
    finally:
        draft.unlink()


def bits_of(token: bytes) -> float:
    """Upper bound of random bits: those of a draw from the smallest alphabet with all its characters."""
    text = token.decode("latin-1")
    size = next((len(set(alphabet)) for alphabet in _ALPHABETS if set(text) <= set(alphabet)), 256)
    return len(token) * math.log2(size)


def _checked(token: bytes, name: str, *, is_text: bool = True) -> bytes:
    if len(token) > MAX_TOKEN_NBYTES:
        raise ConfigError(f"{name} has {len(token)} bytes, at most {MAX_TOKEN_NBYTES} are allowed")
    if b"\0" in token:
        raise ConfigError(f"{name} must be text: it holds a NUL byte, which no variable can carry")
    tokens = list(filter(None, map(bytes.strip, token.splitlines()))) if is_text else [token]
    for one in tokens or [b""]:
        if (bits := bits_of(one)) < MIN_TOKEN_BITS or len(set(one)) < MIN_CHARACTERS:
            raise ConfigError(
                f"{name} can be guessed: its {len(one)} characters hold at most {bits:.0f} bits; it must have "
                f"{MIN_TOKEN_BITS} random ones, 32 hexadecimal digits for example; {HOW_TO_SET}"
            )
    return auth.SEPARATOR.join(tokens)


REQUEST_HEADER = "X-Kfcomm-Proof"
ANSWER_HEADER = "X-Kfcomm-Answer"
GREETING = b"kfcomm store "
SHOWN_PATH = "/v1/shown"
MAX_SHOWN_NBYTES = 1 << 14
IDENTITY_NBYTES = 16
_FRESH_NBYTES = 16
_HEADER = re.compile(r"([0-9a-f]{32})\.([0-9]{1,15})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_WINDOW = 1024
_MAX_CLIENTS = 1 << 17


def nonce_of(identity: bytes) -> bytes:
    """A fresh nonce for a store of the job with this identity (`IDENTITY_NBYTES`)."""
    return identity + secrets.token_bytes(_FRESH_NBYTES)


def identity_of(nonce: bytes) -> bytes:
    """The inverse: identity of the job whose store drew the nonce."""
    return nonce[:IDENTITY_NBYTES]


class Ticket(NamedTuple):
    """One request: client, number, path, digest of the body, and the token that signs it."""

    client: str
    number: int
    path: str
    digest: bytes
    token: bytes

    @property
    def context(self) -> bytes:
        """Text that the proofs of the request and its answer sign."""
        return f"{self.client}.{self.number}.{self.path}.".encode() + self.digest


def request_header(nonce: bytes, ticket: Ticket) -> str:
    """The value of `REQUEST_HEADER` for one request."""
    signature = auth.proof(ticket.token, nonce, b"request " + ticket.context)
    return f"{ticket.client}.{ticket.number}.{ticket.digest.hex()}.{signature.hex()}"


def answer_header(nonce: bytes, ticket: Ticket, status: int, body: bytes) -> str:
    """The value of `ANSWER_HEADER` for the answer to one request, signed as that was."""
    return auth.proof(ticket.token, nonce, _answer_context(ticket, status, body)).hex()


def is_answer_valid(nonce: bytes, ticket: Ticket, status: int, body: bytes, header: str) -> bool:
    """Whether an answer to this very request was signed with the token."""
    if not re.fullmatch(r"[0-9a-f]{64}", header):
        return False
    return auth.proven(ticket.token, nonce, _answer_context(ticket, status, body), bytes.fromhex(header)) is not None


def digest_of(body: bytes) -> bytes:
    """32 bytes: SHA-256 of a body."""
    return hashlib.sha256(body).digest()


def _answer_context(ticket: Ticket, status: int, body: bytes) -> bytes:
    return b"answer " + ticket.context + status.to_bytes(2, "big") + digest_of(body)


@dataclass(slots=True)
class Authenticator:
    """The server's check of signed requests; each passes once.

    It remembers which numbers each client has used, as the anti-replay window of IPsec does (RFC 4303 section 3.4.3).

    Memory: 200 bytes per client that has proven the token; none for others.
    """

    token: bytes
    nonce: bytes
    _windows: dict[str, _Window] = field(default_factory=dict)

    def admit(self, path: str, header: str) -> Ticket | None:
        """The request that ``header`` signs; None to refuse it."""
        match = _HEADER.fullmatch(header)
        if match is None:
            return None
        unproven = Ticket(match[1], int(match[2]), path, bytes.fromhex(match[3]), b"")
        token = auth.proven(self.token, self.nonce, b"request " + unproven.context, bytes.fromhex(match[4]))
        if token is None:
            return None
        ticket = unproven._replace(token=token)
        if ticket.client not in self._windows and len(self._windows) >= _MAX_CLIENTS:
            return None
        window = self._windows.setdefault(ticket.client, _Window())
        return ticket if window.take(ticket.number) else None


@dataclass(slots=True)
class _Window:
    """Recently used numbers: bit ``i`` of ``seen`` is number ``highest - i``."""

    highest: int = -1
    seen: int = 0

    def take(self, number: int) -> bool:
        """Mark ``number`` as used; return whether it was new."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = 1 | (self.seen << ahead if ahead < _WINDOW else 0) & ((1 << _WINDOW) - 1)
            self.highest = number
            return True
        if -ahead >= _WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True
