"""JAX arrays in and out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays import adapt, adapt_out, dtype_name, dtype_of
from kfcomm.arrays.dtypes import SUPPORTED_NAMES
from kfcomm.errors import ConfigError

jax = pytest.importorskip("jax")
jnp = jax.numpy

NARROW = [name for name in SUPPORTED_NAMES if name not in ("int64", "uint64", "float64", "complex128")]


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
@pytest.mark.parametrize("name", NARROW)
def test_round_trip(name: str, shape: tuple[int, ...]) -> None:
    x = jnp.ones(shape, name)
    host = adapt(x)
    assert (dtype_name(host.dtype), host.shape, host.is_view) == (name, shape, True)
    assert not host.flat.flags.writeable
    back = host.restore(host.flat.copy())
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.shape) == (x.dtype, shape)
    assert bool((back == x).all())


def test_transposed() -> None:
    x = jnp.arange(12).reshape(3, 4)
    assert adapt(x.T).flat.tolist() == np.arange(12).reshape(3, 4).T.flatten().tolist()


def test_wide_types_and_several_devices() -> None:
    """In a process of its own, as both are decided when JAX starts."""
    code = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kfcomm.arrays import adapt

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
for name in ("int64", "uint64", "float64", "complex128"):
    host = adapt(jax.numpy.ones((2, 3), name))
    back = host.restore(host.flat.copy())
    assert (host.dtype, back.dtype, back.shape) == (name, name, (2, 3))
first, second = jax.devices()
placed = jax.device_put(np.ones(3), second)
host = adapt(placed)
assert host.restore(host.flat.copy()).devices() == {second}
assert host.restore(np.ones(6), (2, 3)).devices() == {second}
spread = jax.device_put(np.arange(4.0), NamedSharding(Mesh(np.array([first, second]), "i"), PartitionSpec("i")))
host = adapt(spread)
assert host.flat.tolist() == [0, 1, 2, 3]
back = host.restore(host.flat.copy())
assert back.sharding == spread.sharding and back.tolist() == [0, 1, 2, 3]
assert host.restore(np.ones(3), (3,)).devices() == {first}
print("done")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["done"], done.stderr


def test_an_array_that_was_not_placed_leaves_its_result_free() -> None:
    x = jnp.ones(3)
    assert not adapt(x).restore(np.ones(3, np.float32)).committed
    placed = jax.device_put(x, jax.devices()[0])
    assert adapt(placed).restore(np.ones(3, np.float32)).committed


def test_inside_a_transformation() -> None:
    with pytest.raises(ConfigError, match=r"inside jax.jit, grad or vmap: call it outside"):
        jax.jit(adapt)(jnp.ones(2))
    with pytest.raises(ConfigError, match="call it outside"):
        jax.grad(lambda x: adapt(x).size)(1.0)


@pytest.mark.parametrize("make", [lambda: jax.random.key(0), lambda: jnp.ones(2, "float8_e4m3fn")])
def test_other_dtypes_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="not supported; supported are"):
        adapt(make())


def test_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="out cannot be a ArrayImpl, which cannot be written to"):
        adapt_out(jnp.ones(2), (2,), dtype_of("float32"))
