import re
import subprocess
import sys
from dataclasses import astuple, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.devices import DeviceReport
from kfcomm.common.version import PROTOCOL_VERSION, __version__
from kfcomm.errors import RemoteProtocolError
from kfcomm.launch.job import who_launches
from kfcomm.rendezvous.backends.etcd.leases import _described, _myself
from kfcomm.rendezvous.identity import MAX_WIRE_NBYTES, PeerInfo, host_id, process_uid
from kfcomm.rendezvous.saved_costs import path_of_costs
from kfcomm.types import Costs

DEVICE = DeviceReport("cuda", "GPU-8f1c", "NVIDIA H100 80GB HBM3", 13010, "nccl", 23207)
HERE = PeerInfo.here(rank=3, address="10.0.0.1", port=4711, unix="\0kfcomm-1", device=DEVICE)
ME = replace(HERE, transport="nccl")


def test_it_survives_the_wire() -> None:
    assert PeerInfo.from_wire(ME.to_wire()) == ME
    assert PeerInfo.from_wire(replace(ME, unix=None).to_wire()).unix is None
    for device in (DeviceReport(), DeviceReport(lack="no driver"), replace(DEVICE, backend="", backend_version=0)):
        assert PeerInfo.from_wire(replace(ME, device=device).to_wire()).device == device


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", -1),
        ("rank", 1 << 40),
        ("rank", True),
        ("rank", "3"),
        ("uid", ""),
        ("uid", "x" * 65),
        ("uid", 7),
        ("address", "node7"),
        ("address", "10.0.0.1\n"),
        ("port", 0),
        ("port", 65536),
        ("unix", ""),
        ("unix", 5),
        ("unix", "/" * 200),
        ("host", "\x1b[2J"),
        ("hostname", "x" * 256),
        ("pid", 0),
        ("versions", ["0.1"]),
        ("versions", "01"),
        ("versions", [1, 1]),
        ("versions", ["0.1", "1"]),
        ("costs", None),
        ("costs", [1e-6]),
        ("costs", [None] * 6 + [1]),
        ("costs", [-1.0] + [None] * 6),
        ("links", None),
        ("links", b"12345678"),
        ("links", b"1234567890"),
        ("links", "rows"),
        ("transport", "pigeon"),
        ("transport", None),
        ("transport", ["tcp"]),
        ("device", None),
        ("device", []),
        ("device", "cudacud"),
    ],
)
def test_a_field_that_cannot_be_is_refused(field: str, value: object) -> None:
    forged = dict(zip(PeerInfo.__dataclass_fields__, astuple(ME), strict=True)) | {field: value}
    with pytest.raises(RemoteProtocolError, match="protocol" if value == ["0.1", "1"] else field.removesuffix("s")):
        PeerInfo.from_wire(msgpack.packb(list(forged.values())))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "x" * 17),
        ("kind", None),
        ("kind", ""),
        ("uuid", ""),
        ("uuid", "\x1b[2J"),
        ("uuid", "x" * 65),
        ("model", 7),
        ("model", "a\nb"),
        ("driver", -1),
        ("driver", 1 << 40),
        ("driver", True),
        ("driver", "13010"),
        ("backend", b"nccl"),
        ("backend_version", 2.28),
        ("backend_version", None),
        ("lack", "x" * 401),
        ("lack", ["no driver"]),
    ],
)
def test_a_device_that_cannot_be_is_refused(field: str, value: Any) -> None:
    forged = replace(ME, device=replace(DEVICE, **{field: value}))
    with pytest.raises(RemoteProtocolError, match="device"):
        PeerInfo.from_wire(forged.to_wire())


def test_a_backend_without_a_device_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="has no backend"):
        PeerInfo.from_wire(replace(ME, device=DeviceReport(backend="nccl")).to_wire())


@given(st.builds(DeviceReport, model=st.text(), lack=st.text(max_size=2000)))
def test_device_texts_are_made_printable(report: DeviceReport) -> None:
    me = PeerInfo.here(rank=0, address="::1", port=1, device=report)
    assert PeerInfo.from_wire(me.to_wire()) == me


def test_measured_costs_are_sent() -> None:
    sent = replace(ME, costs=Costs(overhead_s=7e-6, cross_alpha_s=1e-4))
    assert PeerInfo.from_wire(sent.to_wire()).costs == sent.costs


def test_the_longest_description_fits() -> None:
    long = "\U0001f600" * 4000
    report = DeviceReport(long, long, long, 2**31 - 1, long, 2**31 - 1, long)
    me = PeerInfo.here(rank=0, address="::1", port=1, unix="/" * 107, device=report)
    sent = replace(me, uid=long[:64], host=long[:128], hostname=long[:255], versions=(long[:64], 1)).to_wire()
    assert len(sent) <= MAX_WIRE_NBYTES
    assert PeerInfo.from_wire(sent).device.lack.endswith("…")


def test_the_number_of_fields_is_that_of_the_protocol() -> None:
    said = re.escape(f"15 fields, as of kfcomm {__version__} (protocol {PROTOCOL_VERSION})")
    with pytest.raises(RemoteProtocolError, match=rf"{said}\. Install the same version on all hosts"):
        PeerInfo.from_wire(msgpack.packb(astuple(ME)[:10]))
    with pytest.raises(RemoteProtocolError, match=rf"{said}; it runs kfcomm 0\.0\.9 \(protocol 3\)\. Install"):
        PeerInfo.from_wire(msgpack.packb([*astuple(replace(ME, versions=("0.0.9", 3))), "more"]))


@given(st.binary(max_size=200) | st.lists(st.integers(0, 99) | st.text() | st.none()).map(msgpack.packb))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        PeerInfo.from_wire(data)


def test_too_long_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="bytes"):
        PeerInfo.from_wire(ME.to_wire() + b"\0" * MAX_WIRE_NBYTES)


def test_the_same_process_is_known_again_and_another_is_not() -> None:
    assert process_uid(0) == process_uid(0) != process_uid(1)
    program = "from kfcomm.rendezvous.identity import *; print(process_uid(0), host_id())"
    uid, host = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert uid != process_uid(0)
    assert host == host_id()


@pytest.mark.parametrize(
    ("name", "shown"), [("", "(no name)"), ("a\udcff\nb", "a??b"), ("x" * 300, "x" * 255), ("hôte", "hôte")]
)
def test_any_name_of_a_host_can_be_told(monkeypatch: pytest.MonkeyPatch, name: str, shown: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    here = PeerInfo.here(rank=0, address="127.0.0.1", port=1)
    assert here.hostname == shown
    assert PeerInfo.from_wire(here.to_wire()) == here
    assert shown in who_launches().decode()
    assert shown in _described(_myself())
    assert path_of_costs({"HOME": "/"}).name == f"costs-{shown}.json"
