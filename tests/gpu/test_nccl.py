"""NCCL itself, with one rank: every verb runs through it without a peer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kfcomm.arrays.devices import Device
from kfcomm.errors import TransportError
from kfcomm.transports.base import Part
from kfcomm.transports.nccl import Nccl
from kfcomm.types import Op, Verb
from tests.transports import conforming

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    """Use CUDA and NCCL once, so that the files that they keep open are not counted as leaks of a test."""
    from kfcomm.arrays.devices.cuda import CudaDevice

    device = CudaDevice(0)
    with conforming.group(Nccl(), [device]) as (rank,):
        x = rank.put(np.ones(4, np.float32))
        rank.backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.SUM, -1, rank.stream)
        rank.finish()
    device.close()


@pytest.fixture
def device() -> Iterator[Device]:
    from kfcomm.arrays.devices.cuda import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()


@pytest.mark.parametrize("verb", conforming.REDUCING + conforming.MOVING)
def test_verbs(device: Device, verb: Verb) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    maker = Nccl()
    with conforming.group(maker, [device]) as ranks:
        for name, op in conforming.supported(maker, verb):
            conforming.check(ranks, verb, name, op)


@pytest.mark.parametrize("verb", conforming.REDUCING)
def test_every_element_of_a_large_odd_number_is_reduced(device: Device, verb: Verb) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    maker = Nccl()
    with conforming.group(maker, [device]) as ranks:
        for name, op in conforming.supported(maker, verb):
            conforming.check(ranks, verb, name, op, [(65_537,), (200_001,)])


def test_groups_side_by_side(device: Device) -> None:
    maker = Nccl()
    with conforming.group(maker, [device]) as (one,), conforming.group(maker, [device]) as (other,):
        xs = [rank.put(np.arange(4.0)) for rank in (one, other)]
        for rank, x in zip((one, other), xs, strict=True):
            rank.backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.AVG, -1, rank.stream)
        assert [rank.get(x).tolist() for rank, x in zip((one, other), xs, strict=True)] == [[0, 1, 2, 3]] * 2


def test_after_aborting(device: Device) -> None:
    (rank,) = conforming.connected(Nccl(), [device])
    x = rank.put(np.arange(4.0))
    rank.backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.SUM, -1, rank.stream)
    assert rank.backend.failure() is None
    rank.backend.abort()
    rank.backend.abort()
    assert rank.backend.failure() is None
    with pytest.raises(TransportError, match="aborted or closed"):
        rank.backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.SUM, -1, rank.stream)
    rank.backend.close()
    assert rank.get(x).shape == (4,)  # the device goes on


def test_errors_of_nccl_reach_the_caller(device: Device) -> None:
    """Its own words reach the user; what follows is refused with them as well."""
    (rank,) = conforming.connected(Nccl(), [device])
    x = rank.put(np.arange(4.0))
    with pytest.raises(TransportError, match="NCCL could not launch broadcast: NCCL_ERROR_INVALID_ARGUMENT"):
        rank.backend.launch(Verb.BROADCAST, [Part(x, x)], None, 7, rank.stream)
    with pytest.raises(TransportError, match="NCCL could not launch broadcast"):
        rank.backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.SUM, -1, rank.stream)
    assert "NCCL_ERROR_INVALID_ARGUMENT" in (rank.backend.failure() or "")
    rank.backend.abort()


def test_connecting_with_what_is_no_identity(device: Device) -> None:
    with pytest.raises(TransportError, match="connect rank 0 of 1"):
        Nccl().connect(b"?", 0, 1, device)
