"""Objects that hold tensors, on the wire as msgpack: none is pickled, so what a peer sends is read and cannot run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch

from kfcomm.arrays import adapt, dtype_name, dtype_of
from kfcomm.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    from kfcomm.sync import Communicator

TENSOR, TUPLE = 1, 2
"""Types of msgpack's extensions: what it does not know itself."""


def broadcast_object(value: Any, comm: Communicator, root: int = 0, *, name: str = "object") -> Any:
    """Every rank gets the ``value`` of rank ``root``: as Horovod's function of this name.

    Args:
        value: None, bools, numbers, text, bytes, tensors in host memory, and lists, tuples and dicts of these, such as
            ``optimizer.state_dict()``; ignored on other ranks than ``root``.
        comm: blocking.
        root: rank in the group.
        name: of the collective.

    Raises:
        ConfigError: it holds something else.
    """
    return decoded(comm.broadcast_object(_given(value) if comm.rank == root else None, root, name))


def all_gather_object(value: Any, comm: Communicator, *, name: str = "object") -> list[Any]:
    """Every rank gets the list of all ranks' values; see ``broadcast_object``."""
    return [decoded(one) for one in comm.all_gather_object(_given(value), name)]


def _given(value: Any) -> Any:
    """Encoded; what contains itself is left for the verb to refuse on all ranks."""
    try:
        return encoded(value)
    except RecursionError:
        return value


def encoded(value: Any) -> Any:
    """The same of what msgpack knows; what it cannot carry stays in its place, for the verb to refuse on all ranks."""
    match value:
        case torch.Tensor():
            try:
                array = adapt(value)
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
    """What ``encoded`` was given.

    Raises:
        CollectiveError: a peer has sent what it does not make.
    """
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
