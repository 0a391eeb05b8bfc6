import fcntl
import mmap
import os
import platform
import socket
import sys

import pytest

from kfcomm.errors import RemoteProtocolError, TransportError
from kfcomm.transports.shm.segment import attach, create, why_unsupported
from tests.leaks import descriptors

PAGE = mmap.PAGESIZE


def test_segment_is_shared():
    descriptor, mine = create("test", PAGE)
    theirs = attach(descriptor, PAGE, writable=True)
    os.close(descriptor)
    mine[5] = 7
    theirs[6] = 8
    assert theirs[:7] == mine[:7] == b"\0\0\0\0\0\7\10"


def test_read_only_mapping_cannot_be_written():
    descriptor, _ = create("test", PAGE)
    theirs = attach(descriptor, PAGE, writable=False)
    os.close(descriptor)
    with pytest.raises(TypeError):
        theirs[0] = 1


def test_a_segment_cannot_change_its_size():
    descriptor, _ = create("test", PAGE)
    for nbytes in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_unsealed_segment_is_not_mapped(seals):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(RemoteProtocolError, match="seals"):
        attach(descriptor, PAGE, writable=True)
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE + 1, 2 * PAGE, 1 << 40])
def test_a_segment_of_another_size_is_not_mapped(nbytes):
    descriptor, _ = create("test", PAGE)
    with pytest.raises(RemoteProtocolError, match=f"{PAGE} bytes.* {nbytes} were announced"):
        attach(descriptor, nbytes, writable=True)
    os.close(descriptor)


def test_other_descriptors_are_not_mapped(tmp_path):
    one, other = socket.socketpair()
    file = tmp_path / "file"
    file.write_bytes(bytes(PAGE))
    with one, other, file.open() as opened:
        for descriptor in (one.fileno(), opened.fileno()):
            with pytest.raises(RemoteProtocolError):
                attach(descriptor, PAGE, writable=False)


def test_memory_that_the_system_does_not_give():
    before = descriptors()
    with pytest.raises(TransportError, match="cannot share"):
        create("test", 1 << 62)
    assert descriptors() == before


def test_it_is_supported_here():
    assert why_unsupported() is None


def refuse(*_):
    raise OSError(1, "not today")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch: patch.delattr(os, "memfd_create"), "no memfd_create"),
        (lambda patch: patch.delattr(socket, "send_fds"), "cannot be passed"),
        (lambda patch: patch.setattr(platform, "machine", lambda: "aarch64"), "not ordered on aarch64"),
        (lambda patch: patch.setattr(sys, "maxsize", (1 << 31) - 1), "64-bit"),
        (lambda patch: patch.setattr(os, "memfd_create", refuse), "does not work here: not today"),
    ],
    ids=["no memfd", "no descriptors", "another processor", "32 bits", "forbidden"],
)
def test_why_it_is_not(change, reason, monkeypatch):
    change(monkeypatch)
    assert reason in why_unsupported()
