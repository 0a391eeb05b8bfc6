"""Names that resolve later: by a resolver of the test's own."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.launch.hosts import names_resolved
from kfcomm.rendezvous import resolving
from kfcomm.rendezvous.host import look_up
from kfcomm.rendezvous.join import address_towards
from kfcomm.rendezvous.settings import Settings

pytestmark = pytest.mark.asyncio


class Resolver:
    """Knows one name after so many look-ups."""

    def __init__(self, address: str, after: int) -> None:
        self.address = address
        self.after = after
        self.count = 0

    def __call__(self, host: str, port: int | None, *args: Any, **kwargs: Any) -> list[Any]:
        self.count += 1
        if self.count <= self.after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (self.address, port or 0))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    found = Resolver("127.0.0.1", 3)
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(resolving, "LAST_PAUSE_S", 0.01)
    return found


STORE = Settings(rank=1, size=2, store="http://train-0.train:29600", timeout_s=600.0)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_name_is_looked_up_until_it_resolves(address: str, resolver: Resolver) -> None:
    resolver.address = address
    assert await address_towards(None, STORE) == address
    assert resolver.count == 4


async def test_wait_is_reported_once(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resolving, "SAID_AFTER_S", 0.0)
    await address_towards(None, STORE)
    assert caplog.messages == [
        "rank 1: the host 'train-0.train' does not resolve: Name or service not known; it is looked up for up to 600 s"
    ]


async def test_name_that_never_resolves_is_named_after_the_timeout(resolver: Resolver) -> None:
    resolver.after = 1 << 30
    expected = r"within 0\.05 s: the host 'train-0\.train' does not resolve: Name or service not known"
    with pytest.raises(RendezvousError, match=expected):
        await address_towards(None, STORE._replace(timeout_s=0.05))
    with pytest.raises(RendezvousError, match=r"within 0 s: the host 'node7'"):
        await names_resolved("10.0.0.1:4,node7:4", 0.0)


async def test_names_of_the_list_of_hosts_are_waited_for(resolver: Resolver) -> None:
    await names_resolved("10.0.0.1:4, [fd00::1]:2, node7:4, not a host", 600.0)
    assert resolver.count == 4


async def test_text_that_is_not_a_name() -> None:
    with pytest.raises(ConfigError, match=r"'a\.\.b' is not the name of a host"):
        look_up("a..b")
