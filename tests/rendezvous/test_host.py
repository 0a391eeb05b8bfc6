"""Addresses of this host."""

from __future__ import annotations

import contextlib
import socket

import pytest

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.host import choose_address, interfaces, is_local, is_loopback


def test_loopback_is_listed() -> None:
    assert ("lo", "127.0.0.1") in [(each.name, each.address) for each in interfaces()]


def test_every_listed_address_can_be_bound() -> None:
    for each in interfaces():
        assert is_local(each.address)
        family = socket.AF_INET6 if ":" in each.address else socket.AF_INET
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as listener:
            listener.bind((each.address, 0))


def test_the_route_decides() -> None:
    assert choose_address(None, ("127.0.0.1", 9)) == "127.0.0.1"
    for each in interfaces():
        # towards one of its own addresses a host speaks from that very address
        assert choose_address(None, (each.address, 9)) == each.address


def test_without_a_rendezvous_loopback_is_enough() -> None:
    assert choose_address(None, None) == "127.0.0.1"


@pytest.mark.parametrize("spec", ["lo", "127.0.0.1", "127.0.0.0/8", "127.0.0.1/32", "127.0.0.9/8"])
def test_by_name_address_or_network(spec: str) -> None:
    assert choose_address(spec, ("127.0.0.1", 9)) == "127.0.0.1"


def test_an_address_that_is_not_listed_but_works() -> None:
    assert choose_address("127.0.0.2", None) == "127.0.0.2"


@pytest.mark.parametrize("spec", ["no-such-interface", "198.51.100.7", "198.51.100.0/24", ""])
def test_unknown_interface_is_refused_with_a_list(spec: str) -> None:
    with pytest.raises(ConfigError, match=rf"{spec}.*lo 127\.0\.0\.1"):
        choose_address(spec, ("127.0.0.1", 9))


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid"):
        choose_address(None, ("no-such-host.invalid", 9))


def test_loopback_is_known_by_name_and_address() -> None:
    assert is_loopback("localhost")
    assert is_loopback("127.3.2.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("node7")


def test_addresses_of_other_hosts_are_not_local() -> None:
    assert not is_local("198.51.100.7")
