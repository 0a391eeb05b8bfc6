"""Devices that a computation runs on, which JAX tells only when it compiles.

With ``jax.distributed`` they may belong to several processes. Two operations look at them while they are lowered; a
process that is alone makes neither.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters import mlir

from kfcomm.errors import ConfigError

try:
    from jax.extend.core import Primitive
except ImportError:  # an older JAX
    from jax.core import Primitive

_place, _own = Primitive("kfcomm_place"), Primitive("kfcomm_own")


def place_in_process(number: Any, axes: tuple[str, ...]) -> Any:
    """Return the place of a device of a ``shard_map`` among those of its process: ``number`` if there is one process.

    Args:
        number: index of the device along ``axes``, traced.
        axes: of the mesh, all of them.

    Raises:
        ConfigError: when it is compiled: some process has more devices in the mesh than another.
    """
    return number if jax.process_count() == 1 else _place.bind(number, axes=axes)


def on_own_devices(leaves: list[Any]) -> list[Any]:
    """Return traced arrays of a computation outside of ``shard_map`` and ``pmap`` as they are.

    Raises:
        ConfigError: when it is compiled: it may run on devices of other processes, and then XLA would make a callback
            in one of them only, and give the others results of zeros.
    """
    return leaves if jax.process_count() == 1 else [_own.bind(leaf) for leaf in leaves]


def _lower_place(ctx: Any, number: Any, *, axes: tuple[str, ...]) -> Any:
    mesh = ctx.module_context.axis_context.mesh
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in axes]).ravel()
    counts: Counter[int] = Counter()
    places = []
    for device in devices:
        places.append(counts[device.process_index])
        counts[device.process_index] += 1
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} of process {process}" for process, count in sorted(counts.items()))
        raise ConfigError(f"each process needs as many devices in the mesh as any other, not {numbers}")
    return mlir.lower_fun(lambda number: jnp.asarray(places, np.int32)[number], multiple_results=False)(ctx, number)


def _lower_own(ctx: Any, leaf: Any) -> Any:
    number = ctx.module_context.axis_context.num_devices
    if number > 1:
        raise ConfigError(
            f"a collective of kfcomm.jax in a computation of {number} devices, which may be of several processes: call "
            "it inside shard_map, where each device calls its counterparts"
        )
    return [leaf]


for primitive, lowering in ((_place, _lower_place), (_own, _lower_own)):
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, lowering)
