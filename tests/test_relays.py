"""Relays that change, repeat or forge messages between ranks: no wrong sum, and no rank lost."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.errors import CollectiveError, PeerLost
from kfcomm.rendezvous.store import StoreServer
from kfcomm.transports import handshake
from kfcomm.transports.tls import load, make
from tests.relays import Relay

TIMEOUT_S = 5
"""The length of a record of TLS is not protected: where it is changed to a larger one, the reader waits for more."""
TOKEN = b"0123456789abcdef0123456789abcdef"


@contextlib.asynccontextmanager
async def joined(size: int, **settings: Any) -> AsyncIterator[Sequence[Any]]:
    """A world of so many ranks over TCP, all on this loop."""
    tls = load(settings["tls"]) if "tls" in settings else None
    store = await StoreServer.start("127.0.0.1", token=TOKEN, tls=tls)
    usual = {"size": size, "store": store.url, "serve": False, "token": TOKEN, "transport": "tcp", "lost_after": 3600}
    contexts = [kfcomm.init(rank=rank, **usual, **settings) for rank in range(size)]
    try:
        yield await asyncio.gather(*(context.__aenter__() for context in contexts))
        await asyncio.gather(*(context.__aexit__(None, None, None) for context in contexts))
    finally:
        await store.close()


async def ends(comms: Sequence[Any], random: Random, count: int) -> Counter[str]:
    """How so many all_reduces of random sizes end, on all ranks."""
    found: Counter[str] = Counter()
    for number in range(count):
        x = np.arange(random.choice([1, 125, 5000, 50_000]), dtype=np.int64)
        right = len(comms) * x + sum(range(len(comms)))
        calls = [comm.all_reduce(x + comm.rank, name=f"n{number}", timeout=TIMEOUT_S) for comm in comms]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, np.ndarray):
                assert (result == right).all()
                found["right"] += 1
            else:
                assert isinstance(result, CollectiveError), result
                assert not isinstance(result, PeerLost), result
                found["failed"] += 1
    return found


@pytest.mark.parametrize("protection", ["checksum", "tls"])
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_relay_causes_no_wrong_sum_and_no_lost_rank(
    protection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "tls")
    settings = {"checksum": True} if protection == "checksum" else {"tls": str(tmp_path / "tls")}
    relay = Relay(Random(7), spared=300 if protection == "checksum" else 4000)
    monkeypatch.setattr(handshake, "connect", relay.connect)
    async with joined(3, **settings) as comms:
        found = await ends(comms, relay.random, 60)
        assert relay.done
        assert found["right"]
        relay.every = 1 << 30  # and in peace all is well again
        while (await ends(comms, relay.random, 1))["failed"]:
            pass
    await relay.close()
