"""State that becomes the same on all ranks: parameters, buffers, optimizers, and objects that hold tensors.

Objects travel as msgpack and are never pickled, so that what a peer sends is data and cannot run code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch

from kfcomm.arrays import adapt, dtype_name, dtype_of
from kfcomm.common.arguments import checked_name
from kfcomm.errors import CollectiveError, ConfigError, PeerLost
from kfcomm.torch.memory import is_on_device
from kfcomm.torch.reductions import is_elastic
from kfcomm.torch.tensors import is_plain, places, together

if TYPE_CHECKING:
    from kfcomm.sync import Communicator
    from kfcomm.sync.handle import Handle


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Any]], comm: Communicator, root: int = 0, *,
    name: str = "parameters",
) -> None:  # fmt: skip
    """Copy the tensors of rank ``root`` to all ranks, in place, as Horovod's function of this name.

    Args:
        parameters: ``model.state_dict()`` or ``model.named_parameters()``; the same names, shapes and dtypes on every
            rank. Values that are not tensors stay as they are.
        comm: blocking.
        root: rank whose values they get.
        name: of the collective.

    Raises:
        ConfigError: on all ranks, if they do not give the same tensors.

    Cost: the bytes of the tensors; small ones travel together.
    """
    name = checked_name(name)
    items = parameters.items() if isinstance(parameters, Mapping) else parameters
    tensors = {one: value.detach() for one, value in items if isinstance(value, torch.Tensor)}
    about, problem = described(tensors)
    check_alike(comm, name, about, problem)
    TensorBroadcast(tensors.values(), comm, root, name).wait()


def described(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], str | None]:
    """Descriptions of tensors by name, for the comparison between ranks; and their fault, if any."""
    about = {one: f"{tuple(x.shape)} {x.dtype}{_place(x)}" for one, x in tensors.items()}
    missing = next((one for one, tensor in tensors.items() if tensor.is_meta), None)
    return about, None if missing is None else f"{missing} is on device 'meta', where it has no numbers"


def _place(tensor: torch.Tensor) -> str:
    """The type of device; not its number, which may differ between ranks."""
    return "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"


def check_alike(comm: Communicator, name: str, about: Mapping[str, str], problem: str | None) -> None:
    """Compare descriptions between ranks, and refuse differences and problems, on all ranks."""
    # Gathered only if they differ: only the error needs the descriptions of all ranks.
    said = [[one, text] for one, text in about.items()]
    if not comm.consensus([said, problem or ""], name=f"{name}/which"):
        raise ConfigError(_difference(comm, name, comm.all_gather_object([said, problem], f"{name}/differs")))
    if problem is not None:
        raise ConfigError(problem)


def _difference(comm: Communicator, name: str, said: list[Any]) -> str:
    members = comm._inner._group.view.members
    problems = {world: problem for world, (_, problem) in zip(members, said, strict=True) if problem is not None}
    if problems:
        return f"{name!r} cannot work: " + "; ".join(f"rank {world}: {one}" for world, one in problems.items())
    first = dict(said[0][0])
    for world, (pairs, _) in zip(members, said, strict=True):
        own = dict(pairs)
        for one in (*own, *first):
            if own.get(one) != first.get(one):
                sides = [f"{found.get(one, 'not there')} on rank {rank}" for found, rank in
                         ((first, members[0]), (own, world))]  # fmt: skip
                return f"{name!r} is not the same on all ranks: {one} is {sides[0]}, and {sides[1]}"
        if list(own) != list(first):
            return f"{name!r} is not the same on all ranks: {members[0]} and {world} have another order"
    return f"{name!r} is not the same on all ranks"


LARGE_NBYTES = 1 << 20
"""From here on a tensor on a device travels by itself, without a copy."""


class TensorBroadcast:
    """Broadcast of tensors of any dtypes, in the memory of the host and of a device, to themselves; under way.

    Those in host memory travel as one. On a device small ones are copied to one buffer, on the current stream, which
    waits for the results. In an elastic job all go through host memory, where the call survives the loss of a rank.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], comm: Communicator, root: int, name: str) -> None:
        # Tied parameters and shared buffers are sent once.
        own = {(one.data_ptr(), one.shape, one.stride()): one for one in tensors if one.numel()}
        here = [one for one in own.values() if not is_on_device(one)]
        there = [one.detach() for one in own.values() if is_on_device(one)]
        self._comm, self._root = comm, root
        self._parts: list[tuple[Handle[Any], Callable[[], object] | None]] = []
        if here:
            self._begin_on_host(here, name)
        if there and is_elastic(comm):
            copies = [one.cpu() for one in there]
            self._begin_on_host(copies, f"{name}/device", lambda: torch._foreach_copy_(there, copies))
        elif there:
            self._begin_on_device(there, f"{name}/device")

    def _begin_on_host(
        self, tensors: list[torch.Tensor], name: str, finish: Callable[[], object] | None = None
    ) -> None:
        arrays, copied = places(tensors, as_bytes=True)
        handle = self._comm.broadcast_async(arrays, self._root, name=name, out=arrays)
        self._parts.append((handle, together([copied, finish])))

    def _begin_on_device(self, tensors: list[torch.Tensor], name: str) -> None:
        large = [one for one in tensors if one.nbytes >= LARGE_NBYTES and is_plain(one)]
        small = [one for one in tensors if one.nbytes < LARGE_NBYTES or not is_plain(one)]
        for number, one in enumerate(large):
            self._send(one.view(-1).view(torch.uint8), f"{name} {number}", None)
        if small:
            flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in small])
            parts = flat.split([one.nbytes for one in small])

            def put() -> None:
                for one, part in zip(small, parts, strict=True):
                    # A copy, since the bytes of a tensor may begin at any address.
                    one.copy_(part.clone().view(one.dtype).view(one.shape))

            self._send(flat, name, put)

    def _send(self, flat: torch.Tensor, name: str, finish: Callable[[], object] | None) -> None:
        self._parts.append((self._comm.broadcast_async(flat, self._root, name=name, out=flat), finish))

    def done(self) -> bool:
        """Whether it is over."""
        return all(handle.done() for handle, _ in self._parts)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def wait(self) -> None:
        """Wait for the end, and copy what came to the tensors; raise the error of one that has failed."""
        parts, self._parts = self._parts, []
        for handle, finish in parts:
            handle.wait()
            if finish is not None:
                finish()

    def cancel(self) -> None:
        """End what is under way, on every rank."""
        for handle, _ in self._parts:
            handle.cancel()


class Buffers:
    """The buffers of a model, which get the values of rank 0 after each pass."""

    def __init__(self, model: torch.nn.Module, comm: Communicator, name: str) -> None:
        self._of = [(module, one) for module in model.modules() for one in module._buffers]
        self._comm = comm
        self._name = name
        self._under_way: TensorBroadcast | None = None
        self._tensors: list[torch.Tensor] = []

    def begin(self, *, is_wanted: bool = True) -> None:
        """Begin to broadcast the buffers of rank 0; a rank that does not want them takes part all the same."""
        found = [module._buffers.get(one) for module, one in self._of]
        # Clones take rank 0's values in the place of the buffers of a rank whose pass has failed.
        tensors = [one if is_wanted else one.clone() for one in found if one is not None]
        self._tensors = tensors
        self._under_way = TensorBroadcast(tensors, self._comm, 0, self._name)

    def done(self) -> bool:
        """Whether they are there, or have failed."""
        return self._under_way is None or self._under_way.done()

    def wait(self) -> None:
        """Wait until they are there."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            under_way.wait()
        except PeerLost:
            if not self._comm.outlives:
                raise
            self._take_from_others()

    def _take_from_others(self) -> None:
        """Take the buffers of the lowest surviving rank: rank 0 was lost, on all ranks, before any had its buffers."""
        told = self._comm.all_gather_object([encoded(one) for one in self._tensors], f"{self._name}/others")
        for own, given in zip(self._tensors, told[0], strict=True):
            own.copy_(decoded(given))

    def cancel(self) -> None:
        """End what is under way, on every rank."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.cancel()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, comm: Communicator, root: int = 0, *, name: str = "optimizer"
) -> None:
    """Copy the state and groups of rank ``root``'s optimizer to all ranks, as Horovod's function of this name.

    Args:
        optimizer: over the same parameters on every rank; it may have no state yet.
        comm: blocking.
        root: rank in the group.
        name: of the collective.

    Raises:
        ConfigError: the state holds a value that cannot be sent, see ``broadcast_object``.
    """
    state = broadcast_object(optimizer.state_dict() if comm.rank == root else None, comm, root, name=name)
    if comm.rank != root:
        optimizer.load_state_dict(state)


TENSOR, TUPLE = 1, 2
"""Extension types of msgpack for values that it does not have itself."""


def broadcast_object(value: Any, comm: Communicator, root: int = 0, *, name: str = "object") -> Any:
    """Return the ``value`` of rank ``root`` on every rank, as Horovod's function of this name.

    Args:
        value: None, bools, numbers, text, bytes, tensors, and lists, tuples and dicts of these, such as
            ``optimizer.state_dict()``; ignored on other ranks than ``root``. Tensors arrive in host memory.
        comm: blocking.
        root: rank in the group.
        name: of the collective.

    Raises:
        ConfigError: it holds a value of another type.
    """
    return decoded(comm.broadcast_object(_given(value) if comm.rank == root else None, root, name))


def all_gather_object(value: Any, comm: Communicator, *, name: str = "object") -> list[Any]:
    """Return the list of all ranks' values on every rank; types as for ``broadcast_object``."""
    return [decoded(one) for one in comm.all_gather_object(_given(value), name)]


def _given(value: Any) -> Any:
    """The encoded value; one that contains itself is left for the verb to refuse on all ranks."""
    try:
        return encoded(value)
    except RecursionError:
        return value


def encoded(value: Any) -> Any:
    """The value in types that msgpack has; other types stay in place, for the verb to refuse on all ranks."""
    match value:
        case torch.Tensor(is_meta=False):
            try:
                array = adapt(value.detach().cpu())
            except ConfigError:
                return value
            return msgpack.ExtType(TENSOR, _packed([dtype_name(array.dtype), list(array.shape), array.flat.tobytes()]))
        case tuple():
            content = [encoded(one) for one in value]
            data = _packed(content)
            return content if data is None else msgpack.ExtType(TUPLE, data)
        case list():
            return [encoded(one) for one in value]
        case dict():
            return {key: encoded(one) for key, one in value.items()}
    return value


def _packed(content: Any) -> bytes | None:
    try:
        data: bytes = msgpack.packb(content)
    except (TypeError, ValueError, OverflowError):
        return None
    return data


def decoded(value: Any) -> Any:
    """The value that ``encoded`` was given."""
    match value:
        case msgpack.ExtType(code=int(code), data=bytes(data)):
            try:
                return _extension(code, msgpack.unpackb(data, strict_map_key=False))
            except (TypeError, ValueError, ConfigError) as error:
                raise CollectiveError(f"a peer's object cannot be read: {error}") from error
        case list():
            return [decoded(one) for one in value]
        case dict():
            return {key: decoded(one) for key, one in value.items()}
    return value


def _extension(code: int, content: Any) -> Any:
    if code == TUPLE:
        return tuple(decoded(one) for one in content)
    if code != TENSOR:
        raise ValueError(f"an extension of type {code}")
    name, shape, data = content
    array = np.frombuffer(data, dtype_of(name)).reshape(shape)
    flat = torch.from_numpy(array.flatten().view(np.uint8))
    return flat.view(getattr(torch, name)).reshape(array.shape)
