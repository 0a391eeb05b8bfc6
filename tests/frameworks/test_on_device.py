"""Arrays of torch and JAX that are not in GPU memory, or that are unsupported on any device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kfcomm.arrays.cuda_kinds import JAX, TORCH
from kfcomm.arrays.on_device import is_on_device
from kfcomm.errors import ConfigError

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")


@pytest.mark.parametrize(
    "x", [torch.ones(2), torch.ones(2, device="meta"), jax.numpy.ones(2)], ids=["cpu", "meta", "jax"]
)
def test_elsewhere(x: Any) -> None:
    assert not is_on_device(x)


def test_inside_a_transformation() -> None:
    seen: list[bool] = []
    jax.jit(lambda x: (seen.append(is_on_device(x)), x)[1])(jax.numpy.ones(2))
    assert seen == [False]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 2).to_sparse(), r"layout torch.sparse_coo cannot be exchanged: pass x.to_dense\(\)"),
        (torch.zeros(2, dtype=torch.complex64).conj(), r"pass x.resolve_conj\(\)"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "dtype torch.float8_e4m3fn is not supported"),
    ],
)
def test_tensors_that_cannot_be_exchanged(x: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TORCH.read(x, None)


def test_jax_arrays_that_cannot_be_exchanged() -> None:
    with pytest.raises(ConfigError, match="is not supported"):
        JAX.read(jax.random.key(0), None)
    with pytest.raises(ConfigError, match="out cannot be a JAX array, which cannot be written to"):
        JAX.check_writable(jax.numpy.ones(2))
    with pytest.raises(ConfigError, match=r"on several devices .*: pass x.addressable_shards"):
        JAX.ordinal(SimpleNamespace(devices=lambda: {0, 1}))
