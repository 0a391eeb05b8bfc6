"""Transports by name, the order in which ``auto`` prefers them, and one that is added by its line alone."""

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from kfcomm.transports import registry
from kfcomm.transports.base import Endpoint
from kfcomm.transports.registry import LINKS, TRANSPORT_NAMES, TRANSPORTS, named, selected


def test_names_are_the_documented_settings():
    assert LINKS == ("auto", "tcp", "unix", "shm")
    assert (*LINKS, "nccl", "ipc") == TRANSPORT_NAMES


def test_auto_prefers_shared_memory_then_unix_sockets_then_tcp():
    assert [transport.name for transport in selected("auto")] == ["shm", "unix", "tcp"]
    assert [transport.name for transport in selected("auto") if not transport.is_local] == ["tcp"]


@pytest.mark.parametrize("name", ["tcp", "unix", "shm"])
def test_explicit_setting_selects_one_transport(name):
    assert selected(name) == (named(name),)


@pytest.mark.parametrize("transport", [one for one in TRANSPORTS if one.has_links], ids=lambda one: one.name)
def test_transport_module_implements_its_functions(transport):
    module = importlib.import_module(transport.module)
    assert transport.why_unsupported() is None
    assert callable(module.open_endpoint)


def test_added_transport_is_opened_from_its_module(monkeypatch):
    class Carrier(Endpoint):
        """Has no links yet."""

    module = ModuleType("carrier")
    module.why_unsupported = lambda: "no carrier here"
    module.open_endpoint = lambda surroundings: Carrier()
    monkeypatch.setitem(sys.modules, "carrier", module)
    added = replace(named("shm"), name="carrier", module="carrier", preference=3, purpose=16)
    monkeypatch.setattr(registry, "TRANSPORTS", (*TRANSPORTS, added))
    assert selected("auto")[0] is added
    assert added.why_unsupported() == "no carrier here"
    assert isinstance(added.open_endpoint(None), Carrier)
