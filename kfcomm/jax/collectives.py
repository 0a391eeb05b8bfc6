"""Collectives of pytrees, eager or as a part of what JAX compiles, with gradients.

Outside of transformations the arrays are read where they are (DLPack), and results are new arrays. Inside, a call is
one callback for a whole tree, whose arrays travel all at once: on a CPU a ``buffer_callback``, which reads and
writes the memory of what is compiled, elsewhere an ``io_callback``, which copies.

Callbacks are *ordered*: one at a time, in the order of the program, which is the same on every rank that traces the
same function. Arrays that are to travel together go into one tree.

A rank may have several devices. What is compiled for them all makes a collective once, of whole arrays. Inside
``shard_map`` and ``pmap`` each device makes one of its own, with those of the same place on other ranks: its name has
``@`` and the place after it. Their mesh may have the devices of all ranks, as processes of ``jax.distributed``.

Ranks that are threads of one process cannot use these functions inside ``jit``: computations with ordered callbacks run
one after the other on a device, whichever thread has begun them.

Invariants: a collective inside ``jit`` runs exactly as often as the program calls it, also where its result is unused;
inside ``jax.checkpoint`` once more in the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import io_callback

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.jax.placement import on_own_devices, place_in_process
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.driver import before_close
from kfcomm.train.procedure import is_elastic

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # an older JAX
    buffer_callback = None

Tree = TypeVar("Tree")
Call: TypeAlias = Callable[[str, list[Any], list[Any] | None], list[Any]]
"""Makes results of arrays under a name, in the arrays that are given for them or in others."""

AGAIN = "/gradient"
"""Suffix of a collective's name for that of its gradient."""
LINEAR = ("sum", "avg")


def all_reduce(tree: Tree, comm: Any, *, name: str = "tree", op: str = "sum") -> Tree:
    """Reduce each array of the tree over all ranks, as ``Communicator.all_reduce_many`` does.

    Its gradient is an all_reduce with the same ``op``, which is the gradient of all ranks' losses combined.

    Args:
        tree: a pytree of arrays; the same structure, shapes and dtypes on every rank.
        comm: blocking, of ``kfcomm.sync``.
        name: of the collective; its gradient has it with ``/gradient`` after it.
        op: see ``Communicator.all_reduce``.

    Raises:
        ConfigError: ``comm`` does not block; a gradient is asked for of another op than sum and avg; or, when it is
            compiled, devices are of several processes: outside of ``shard_map``, or not as many of each.
        CollectiveError: it failed. Inside ``jit`` JAX raises an error of its own, with the text of this one.

    Cost: an ``all_reduce_many``; inside ``jit`` on a CPU without a copy of arrays or results.
    """
    return cast("Tree", _apply(_all_reduce, tree, comm, name, str(op)))


def broadcast(tree: Tree, comm: Any, root: int = 0, *, name: str = "tree") -> Tree:
    """Copy the arrays of rank ``root`` to all ranks; the gradient is the sum of all ranks' there, and 0 elsewhere.

    Args:
        tree: as in ``all_reduce``; only the root's values matter.
        comm: see ``all_reduce``.
        root: rank in the group.
        name: see ``all_reduce``.

    Raises:
        ConfigError, CollectiveError: see ``all_reduce``.
    """
    return cast("Tree", _apply(_broadcast, tree, comm, name, root))


def all_gather(tree: Tree, comm: Any, *, name: str = "tree") -> Tree:
    """Gather the arrays of all ranks on every rank, stacked: a new first axis is the rank.

    Its gradient is the sum of all ranks' gradients of this rank's part.

    Args:
        tree: see ``all_reduce``.
        comm: see ``all_reduce``.
        name: see ``all_reduce``.

    Raises:
        ConfigError, CollectiveError: see ``all_reduce``.
    """
    return cast("Tree", _apply(_all_gather, tree, comm, name, None))


def _apply(verb: Callable[..., list[Any]], tree: Any, comm: Any, name: str, option: Any) -> Any:
    if not isinstance(comm, Adapter):
        raise ConfigError(f"collectives of JAX need a communicator of kfcomm.sync, not a {type(comm).__name__}")
    leaves, structure = jax.tree.flatten(tree)
    given = _of_shard([jnp.asarray(leaf) for leaf in leaves])
    return jax.tree.unflatten(structure, verb(comm, checked_name(name), option, given))


def called(comm: Any, call: Callable[[list[Any]], list[Any]], leaves: list[Any]) -> list[Any]:
    """Make a call on arrays, which it may keep; for traced ones a callback, whose results are like them."""
    return _called(comm, "", lambda _name, given, _out: call(given), leaves, leaves)


def _called(comm: Any, name: str, call: Call, leaves: list[Any], like: list[Any]) -> list[Any]:
    """Make a call on arrays, or for traced ones a callback. Without a name it needs the arrays after it has returned.

    Raises:
        ConfigError: a call without a name, inside ``shard_map`` or ``pmap``.
    """
    if not leaves:
        return []
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return call(name, leaves, None)
    results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in like]
    _allow_checkpoint()
    # JAX runs computations behind the program: their callbacks need the communicator until they have run.
    before_close(comm, jax.effects_barrier)
    # Ordered, since a callback blocks a thread of XLA's pool, which has one per processor: on two processors JAX 0.10
    # runs two of many independent callbacks at a time, in an order that changes from run to run. Ranks could then hold
    # all their threads in collectives that the others cannot begin. A job that is elastic keeps results for others.
    found: list[Any]
    shard = _shard()
    if shard is not None:
        if not name:
            raise ConfigError(
                "inside shard_map and pmap only the collectives of kfcomm.jax can be called, and algorithms made of "
                "them: call this one outside, with the arrays of all devices"
            )

        def of_one(number: Any, given: list[Any]) -> list[Any]:
            return call(f"{name}@{number}", _arrays(given), None)

        found = io_callback(of_one, results, place_in_process(shard, _axes()), leaves, ordered=True)
        return _of_shard(found)
    leaves = on_own_devices(leaves)
    # XLA cannot divide a ``buffer_callback`` among devices.
    is_on_one_cpu = jax.default_backend() == "cpu" and jax.local_device_count() == 1
    if not name or is_elastic(comm) or buffer_callback is None or not is_on_one_cpu:
        found = io_callback(lambda given: call(name, _arrays(given), None), results, leaves, ordered=True)
        return found
    return _called_in_place(partial(call, name), results, leaves)


def _shard() -> Any:
    """Number of the device that runs a part of a ``shard_map`` or ``pmap``, as a traced array; None outside of them."""
    axes = _axes()
    return jax.lax.axis_index(axes) if axes else None


def _axes() -> tuple[str, ...]:
    """Axes of the mesh of a ``shard_map`` or ``pmap``."""
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()  # not in JAX 0.4
    return tuple(getattr(mesh, "manual_axes", ()))


def _of_shard(leaves: list[Any]) -> list[Any]:
    """Mark arrays as different on each device inside ``shard_map``, where gradients must be so too."""
    shard = _shard()
    # Functions that do no more than that have other names in each version of JAX; XLA removes this.
    return leaves if shard is None else [jnp.where(shard >= 0, leaf, leaf) for leaf in leaves]


def _called_in_place(
    call: Callable[[list[Any], list[Any]], list[Any]], results: list[Any], leaves: list[Any]
) -> list[Any]:
    """Callback that reads and writes XLA's own memory: half of the time of an ``io_callback`` with 2.2 MB."""

    def callback(_: Any, out: list[Any], _begun: Any, given: list[Any]) -> None:
        places = _arrays(out[1:])
        for place, one in zip(places, call(_arrays(given), places), strict=True):
            if one is not place:
                place[...] = one

    # JAX has no order for these: ordered callbacks of a number before and after it give one.
    number = jax.ShapeDtypeStruct((), np.int32)
    begun = io_callback(lambda: np.int32(0), number, ordered=True)
    made: list[Any] = buffer_callback(callback, [number, *results], has_side_effect=True)(begun, leaves)
    done, *found = made
    io_callback(lambda _: None, None, done, ordered=True)
    return found


def _arrays(given: list[Any]) -> list[Any]:
    return [np.asarray(one) for one in given]


def _allow_checkpoint() -> None:
    """Let ``jax.checkpoint`` repeat ordered callbacks, which JAX refuses; may be called again."""
    # All ranks repeat the same collectives, in the same order. JAX has no public name for this: one that has moved
    # them refuses as before.
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import callback, effects

        effects.remat_allowed_effects.add_type(callback.OrderedIOEffect)
        from jax._src.buffer_callback import BufferCallbackEffect

        effects.remat_allowed_effects.add_type(BufferCallbackEffect)


def _of_gradients(change: Callable[[list[Any]], list[Any]], gradients: list[Any]) -> tuple[list[Any]]:
    """Apply ``change`` to gradients, except to those of integers, which JAX marks by a dtype without values."""
    places = [place for place, one in enumerate(gradients) if one.dtype != jax.dtypes.float0]
    found = list(gradients)
    for place, one in zip(places, change([gradients[place] for place in places]), strict=True):
        found[place] = one
    return (found,)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_reduce(comm: Any, name: str, op: str, leaves: list[Any]) -> list[Any]:
    def call(name: str, given: list[Any], out: list[Any] | None) -> list[Any]:
        names = [f"{name}/{place}" for place in range(len(given))]
        places = None if out is None else dict(zip(names, out, strict=True))
        found = comm.all_reduce_many(dict(zip(names, given, strict=True)), op=op, out=places)
        return [found[one] for one in names]

    return _called(comm, name, call, leaves, leaves)


def _all_reduce_forward(comm: Any, name: str, op: str, leaves: list[Any]) -> tuple[list[Any], None]:
    if op not in LINEAR:
        raise ConfigError(f"an all_reduce has a gradient if its op is sum or avg, not {op}")
    return _all_reduce(comm, name, op, leaves), None


def _all_reduce_backward(comm: Any, name: str, op: str, _: None, gradients: list[Any]) -> tuple[list[Any]]:
    return _of_gradients(partial(_all_reduce, comm, name + AGAIN, op), gradients)


_all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _broadcast(comm: Any, name: str, root: int, leaves: list[Any]) -> list[Any]:
    def call(name: str, given: list[Any], out: list[Any] | None) -> list[Any]:
        return list(comm.broadcast(given, root, name=name, out=out))

    return _called(comm, name, call, leaves, leaves)


def _broadcast_forward(comm: Any, name: str, root: int, leaves: list[Any]) -> tuple[list[Any], None]:
    return _broadcast(comm, name, root, leaves), None


def _broadcast_backward(comm: Any, name: str, root: int, _: None, gradients: list[Any]) -> tuple[list[Any]]:
    def change(given: list[Any]) -> list[Any]:
        # All ranks have used the root's arrays, and none has used what the other ranks gave.
        sums = _all_reduce(comm, name + AGAIN, "sum", given)
        return sums if comm.rank == root else [jnp.zeros_like(one) for one in sums]

    return _of_gradients(change, gradients)


_broadcast.defvjp(_broadcast_forward, _broadcast_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _all_gather(comm: Any, name: str, _: None, leaves: list[Any]) -> list[Any]:
    def call(name: str, given: list[Any], out: list[Any] | None) -> list[Any]:
        return list(comm.all_gather(given, name=name, out=out))

    stacked = [jax.ShapeDtypeStruct((comm.size, *one.shape), one.dtype) for one in leaves]
    return _called(comm, name, call, leaves, stacked)


def _all_gather_forward(comm: Any, name: str, _: None, leaves: list[Any]) -> tuple[list[Any], None]:
    return _all_gather(comm, name, None, leaves), None


def _all_gather_backward(comm: Any, name: str, _: None, _residuals: None, gradients: list[Any]) -> tuple[list[Any]]:
    def change(given: list[Any]) -> list[Any]:
        # Every rank has used this rank's part: its gradient is the sum of theirs.
        return [one[comm.rank] for one in _all_reduce(comm, name + AGAIN, "sum", given)]

    return _of_gradients(change, gradients)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward)
