"""Tensors in the form that kfcomm takes: flat NumPy views of their memory, without a copy where they are contiguous.

All are exchanged flat: ranks may give tensors of different shapes with the same number of elements, as with torch's
other backends. A tensor that is not contiguous is copied, and the result copied back. Tensors on a device are passed on
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_char
from typing import Any, NamedTuple

import numpy as np
import torch

from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of, unsupported
from kfcomm.errors import ConfigError


class Place(NamedTuple):
    """Where a result goes.

    Attributes:
        array: flat, to be written to.
        finish: brings it to the tensor; None where it is the tensor's memory.
    """

    array: Any
    finish: Callable[[], object] | None


def read(tensor: Any, *, as_bytes: bool = False) -> Any:
    """A flat array of the tensor's elements: its own memory where that is contiguous, else a copy.

    Args:
        tensor: strided, of any shape.
        as_bytes: kfcomm only has to move it, so that types are taken which it cannot add.

    Raises:
        ConfigError: it cannot add numbers of this type, or there are none in memory.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not is_plain(tensor):
        tensor = tensor.contiguous().resolve_conj().resolve_neg()
    return _flat(tensor, as_bytes)


def place(tensor: Any, *, as_bytes: bool = False) -> Place:
    """Where a result goes that is to be in the tensor; its content is in the array before, too."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_plain(tensor):
        return Place(_flat(tensor, as_bytes), None)
    scratch = tensor.contiguous().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return Place(_flat(scratch, as_bytes), lambda: tensor.copy_(scratch))


def places(tensors: Sequence[Any], *, as_bytes: bool = False) -> tuple[list[Any], Callable[[], object] | None]:
    """The same of several."""
    found = [place(tensor, as_bytes=as_bytes) for tensor in tensors]
    return [one.array for one in found], together(one.finish for one in found)


def together(steps: Any) -> Callable[[], object] | None:
    """All of the steps that there are, as one; None without any."""
    needed = [step for step in steps if step is not None]
    if len(needed) < 2:
        return needed[0] if needed else None
    return lambda: [step() for step in needed]


def is_plain(tensor: Any) -> bool:
    """Whether the elements lie one after the other as they are."""
    return bool(tensor.is_contiguous()) and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: Any, as_bytes: bool) -> Any:
    """Of a plain tensor. After `Tensor.numpy` it could not be resized any more, which is how FSDP frees its memory."""
    if not tensor.is_cpu:
        return tensor.view(-1)
    name = _NAMES.get(tensor.dtype)
    if name is None and not as_bytes:
        raise unsupported(str(tensor.dtype).removeprefix("torch."))
    dtype = dtype_of(name or "uint8")
    nbytes = tensor.nbytes
    if not nbytes:
        return np.empty(0, dtype)
    address = tensor.data_ptr()
    if not address:  # torch's zeros that are no numbers yet, its fake tensors
        raise ConfigError("a tensor without memory cannot be exchanged: pass tensor.clone()")
    memory = (c_char * nbytes).from_address(address)
    memory.tensor = tensor  # lives as long as the array does
    return np.frombuffer(memory, dtype)


_NAMES = {getattr(torch, name): name for name in SUPPORTED_NAMES}
