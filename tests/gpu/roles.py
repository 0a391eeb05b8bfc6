"""Roles of actors of `tests.processes` that work with arrays on their device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kfcomm
from tests.gpu.arrays import Gate, Hog, copy, library, like, new_stream, on_device
from tests.processes.roles import contribution

if TYPE_CHECKING:
    from tests.processes.actor import Actor


async def join(me: Actor, **settings: Any) -> list[str]:
    """Join the world; this rank's route, and the reason."""
    if settings.get("device") != "none":
        library("cupy")
    me.comm = await kfcomm.init(**settings)
    choice = me.comm.route
    assert choice is not None
    return [str(choice.route), choice.because]


def mine(me: Actor, elements: int) -> Any:
    """This rank's input, where it has its arrays."""
    x = contribution(me.comm.rank, elements)
    return x if me.kept.get("on the host") else on_device(x)


def host(y: Any) -> Any:
    """The values of a result, of either kind."""
    return y if isinstance(y, np.ndarray) else y.get()


async def on_the_host(me: Actor) -> None:
    """From now on the inputs of this rank are NumPy's."""
    me.kept["on the host"] = True


async def verbs(me: Actor, *, elements: int) -> list[str]:
    """Every verb once, in flight together; the names of those whose results are wrong or of another kind."""
    comm, size, rank = me.comm, me.comm.size, me.comm.rank
    x = mine(me, elements * size)
    inputs = [contribution(other, elements * size) for other in range(size)]
    total = np.sum(np.array(inputs, np.float64), axis=0)
    part = slice(rank * elements, (rank + 1) * elements)
    expected = {
        "all_reduce": total,
        "reduce": total if rank == 0 else None,
        "broadcast": inputs[0],
        "all_gather": np.stack(inputs),
        "gather": np.stack(inputs) if rank == 0 else None,
        "reduce_scatter": total[part],
        "scatter": inputs[0][part],
        "all_to_all": np.concatenate([one[part] for one in inputs]),
    }
    kept = {"scatter": {"like": x}}  # what is given to other ranks than the root is ignored: not even its kind is known
    handles = {verb: getattr(comm, verb)(x, name=f"v/{verb}", **kept.get(verb, {})) for verb in expected}
    wrong = []
    for verb, wanted in expected.items():
        y = await handles[verb]
        if wanted is None:
            wrong += [] if y is None else [verb]
        elif type(y) is not type(x) or not np.allclose(host(y), wanted, rtol=1e-4, atol=1e-5):
            wrong.append(verb)
    many = await comm.all_reduce_many({"a": x, "b": x[:3]})
    if not np.allclose(host(many["b"]), total[:3], rtol=1e-4, atol=1e-5):
        wrong.append("all_reduce_many")
    if not np.array_equal(host(x), inputs[rank]):
        wrong.append("an input was changed")
    return wrong


async def all_reduce(
    me: Actor, *, name: str, elements: int, timeout: float | None = None, in_place: bool = False
) -> str:
    """The bytes of the first elements of the sum, as hexadecimal digits; all of it was found right."""
    x = mine(me, elements)
    y = await me.comm.all_reduce(x, name, timeout=timeout, out=x if in_place else None)
    assert y is x or not in_place
    exact = sum(contribution(rank, elements).astype(np.float64) for rank in range(me.comm.size))
    np.testing.assert_allclose(host(y), exact, rtol=1e-4, atol=1e-5)
    return bytes(host(y)[:64].tobytes()).hex()


async def post(me: Actor, *, name: str, elements: int) -> None:
    """Begin an all_reduce and keep its handle and its input."""
    x = mine(me, elements)
    me.kept[name] = me.comm.all_reduce(x, name), x


async def outcome(me: Actor, *, name: str) -> None:
    """Wait for the end of what `post` began."""
    handle, _ = me.kept.pop(name)
    await handle


async def behind_a_gate(me: Actor, *, elements: int) -> bool:
    """Whether the result is right, on the caller's stream, for an input that is written late on that stream."""
    right, x = on_device(contribution(me.comm.rank, elements)), on_device(np.zeros(elements, np.float32))
    out, stream = like(x), new_stream()
    gate = Gate(stream)
    copy(right, x, stream)
    handle = me.comm.all_reduce(x, "behind a gate", out=out, stream=stream)
    await me.comm.barrier("all have begun")
    assert not handle.done()  # nothing has gone through the host that was not there yet
    gate.open()
    await handle
    exact = sum(contribution(rank, elements).astype(np.float64) for rank in range(me.comm.size))
    return bool(np.allclose(out.get(stream=stream), exact, rtol=1e-4, atol=1e-5))


async def without_memory(me: Actor, *, elements: int, left_nbytes: int) -> None:
    """An all_reduce whose result does not fit into the memory of this device."""
    x = mine(me, elements)
    with Hog(left_nbytes):
        await me.comm.all_reduce(x, "too large")


async def shaped(me: Actor, *, name: str, rows: int) -> None:
    """An all_reduce of so many rows."""
    await me.comm.all_reduce(on_device(np.ones((rows, 2), np.float32)), name)


async def synchronize(me: Actor) -> None:
    """Wait for the device."""
    await me.comm.synchronize()
