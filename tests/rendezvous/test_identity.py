import subprocess
import sys
from dataclasses import astuple, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import RemoteProtocolError
from kfcomm.rendezvous.identity import PeerInfo, host_id, process_uid

ME = PeerInfo.here(rank=3, address="10.0.0.1", port=4711, unix="\0kfcomm-1")


def test_it_survives_the_wire() -> None:
    assert PeerInfo.from_wire(ME.to_wire()) == ME
    assert PeerInfo.from_wire(replace(ME, unix=None).to_wire()).unix is None


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
    ],
)
def test_a_field_that_cannot_be_is_refused(field: str, value: object) -> None:
    forged = dict(zip(PeerInfo.__dataclass_fields__, astuple(ME), strict=True)) | {field: value}
    with pytest.raises(RemoteProtocolError, match="protocol" if value == ["0.1", "1"] else field.removesuffix("s")):
        PeerInfo.from_wire(msgpack.packb(list(forged.values())))


@given(st.binary(max_size=200) | st.lists(st.integers(0, 99) | st.text() | st.none()).map(msgpack.packb))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        PeerInfo.from_wire(data)


def test_too_long_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="bytes"):
        PeerInfo.from_wire(ME.to_wire() + b"\0" * 5000)


def test_the_same_process_is_known_again_and_another_is_not() -> None:
    assert process_uid(0) == process_uid(0) != process_uid(1)
    program = "from kfcomm.rendezvous.identity import *; print(process_uid(0), host_id())"
    uid, host = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert uid != process_uid(0)
    assert host == host_id()
