"""Coverage-guided search of the decoders of bytes from the network (atheris): each decodes them, or raises its error.

    python -m tests.search.decoders --seconds 60 --seed 1

Where atheris does not install, bytes are random, and the output says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from random import Random

import click

from kfcomm.common.version import PROTOCOL_VERSION
from kfcomm.core import frame, gossip, handshake
from kfcomm.core.handshake import Answerer, Dialler, Identity, Keys
from kfcomm.errors import RemoteProtocolError, RendezvousError
from kfcomm.rendezvous.authentication import Authenticator
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.transports.sealed import Seals

TOKEN, NONCE = b"t" * 32, b"n" * 32
GREETING = handshake.Hello(PROTOCOL_VERSION, 0, 1, handshake.Purpose.DATA, NONCE, "uid")


def _head(data: bytes) -> None:
    frame.decode_head(memoryview(data), 0, len(data))


def _gossip(data: bytes) -> None:
    header = frame.decode_header(data)
    if header[0] == frame.Kind.GOSSIP:
        one = gossip.Gossip(0, 4)
        one.neighbour_joined(1)
        for effect in one.receive(1, header):
            assert effect[0] in gossip.Effect


def _greeting(data: bytes) -> None:
    kind, nbytes = handshake.decode_prefix(data[: handshake.PREFIX_NBYTES].ljust(handshake.PREFIX_NBYTES, b"\0"))
    message = handshake.decode(kind, data[handshake.PREFIX_NBYTES :][:nbytes].ljust(nbytes, b"\0"))
    me, peer = Identity(0, "a"), Identity(1, "b")
    Answerer(me, accept=lambda _: None, epoch=0, token=TOKEN, nonce=NONCE).receive(message)
    Dialler(me, peer, purpose=handshake.Purpose.DATA, epoch=0, token=TOKEN, nonce=NONCE).receive(message)


def _sealed(data: bytes) -> None:
    found = Seals(Keys(bytes(32), bytes(32)), has_payloads=False).reader.decode_head(memoryview(data), 0, len(data))
    assert found is None, "sealing needs the key"


def _peer(data: bytes) -> None:
    assert PeerInfo.from_wire(PeerInfo.from_wire(data).to_wire()) == PeerInfo.from_wire(data)


def _request(data: bytes) -> None:
    assert Authenticator(TOKEN, NONCE).admit("/v1/get", data.decode("latin-1")) is None


READERS: tuple[Callable[[bytes], None], ...] = (_head, _gossip, _greeting, _sealed, _peer, _request)
SEEDS: tuple[bytes, ...] = (
    b"\0" + frame.make_encoder()((frame.Kind.CREDIT, 1, 2)),
    b"\1" + frame.make_encoder()((frame.Kind.GOSSIP, 1, 0, [gossip.Body.LOST, 2, "why"]))[8:],
    b"\2" + handshake.encode(GREETING),
    b"\2" + handshake.encode(handshake.Challenge(NONCE, NONCE)),
    b"\3" + bytes(40),
    b"\4" + PeerInfo.here(rank=0, address="127.0.0.1", port=1).to_wire(),
    b"\5" + b"client 1 " + b"0" * 64,
)


def read(data: bytes) -> None:
    """Give the bytes after the first to the reader that it names. Whatever else is raised is a defect."""
    if data:
        try:
            READERS[data[0] % len(READERS)](data[1:])
        except (RemoteProtocolError, RendezvousError):
            return


def main() -> int:
    """Search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.decoders")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for data in SEEDS:
        read(data)
    try:
        import atheris
    except ModuleNotFoundError:
        return _by_chance(given.seconds, Random(given.seed))
    import tempfile
    from pathlib import Path

    for reader in (
        frame.decode_head,
        frame.decode_header,
        gossip.Gossip.receive,
        handshake.decode,
        Authenticator.admit,
    ):
        atheris.instrument_func(reader)
    atheris.instrument_all()
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(SEEDS):
            Path(corpus, str(number)).write_bytes(data)
        options = [f"-max_total_time={given.seconds}", f"-seed={given.seed}", "-max_len=4096", "-rss_limit_mb=1000"]
        atheris.Setup([sys.argv[0], *options, "-timeout=5", "-verbosity=0", "-print_final_stats=1", corpus], read)
        atheris.Fuzz()  # ends the process
    return 0


def _by_chance(seconds: float, random: Random) -> int:
    until_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        data = bytearray(random.choice(SEEDS))
        for _ in range(random.randrange(8)):
            data[random.randrange(len(data))] = random.randrange(256)
        read(bytes(data) + random.randbytes(random.randrange(3)))
        count += 1
    click.echo(f"{count} inputs by chance alone: atheris is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
