"""Tensors as kfcomm takes them: flat NumPy views of their memory, without a copy if they are contiguous.

All are exchanged flat: ranks may give tensors of different shapes with the same number of elements, as with torch's
other backends. A tensor that is not contiguous is copied, and the result copied back. Tensors on a device are passed
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_char
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of, unsupported
from kfcomm.errors import ConfigError


def read(tensor: Any, *, as_bytes: bool = False) -> Any:
    """A flat array of the tensor's elements: its own memory where that is contiguous, else a copy.

    Args:
        tensor: strided, of any shape.
        as_bytes: the elements are only moved, so that dtypes that kfcomm cannot add are allowed.

    Raises:
        ConfigError: kfcomm cannot add this dtype, or the tensor has no memory.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not is_plain(tensor):
        tensor = tensor.contiguous().resolve_conj().resolve_neg()
    return _flat(tensor, as_bytes)


def place(tensor: Any, *, as_bytes: bool = False) -> tuple[Any, Callable[[], object] | None]:
    """Flat memory for a result, holding the tensor's content, and a function that copies it if it is not its own."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_plain(tensor):
        return _flat(tensor, as_bytes), None
    scratch = tensor.contiguous().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return _flat(scratch, as_bytes), lambda: tensor.copy_(scratch)


def places(tensors: Sequence[Any], *, as_bytes: bool = False) -> tuple[list[Any], Callable[[], object] | None]:
    """Memory for results in several tensors, and one function that copies all of them."""
    found = [place(tensor, as_bytes=as_bytes) for tensor in tensors]
    return [array for array, _ in found], together(finish for _, finish in found)


def together(steps: Any) -> Callable[[], object] | None:
    """All steps that are not None, as one; None if all are."""
    needed = [step for step in steps if step is not None]
    if len(needed) < 2:
        return needed[0] if needed else None
    return lambda: [step() for step in needed]


def is_plain(tensor: Any) -> bool:
    """Whether the elements are contiguous, and need no conjugation or negation."""
    return bool(tensor.is_contiguous()) and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: Any, as_bytes: bool) -> Any:
    """The elements of a plain tensor. Not by `Tensor.numpy`: after it FSDP could not free memory by resizing."""
    if not tensor.is_cpu:
        return tensor.view(-1)
    dtype = _dtype_of(tensor.dtype)
    if dtype is None:
        if not as_bytes:
            raise unsupported(str(tensor.dtype).removeprefix("torch."))
        dtype = np.dtype(np.uint8)
    nbytes = tensor.nbytes
    if not nbytes:
        return np.empty(0, dtype)
    address = tensor.data_ptr()
    if not address:  # torch's lazy zeros and fake tensors
        raise ConfigError("a tensor without memory cannot be exchanged: pass tensor.clone()")
    memory = _bytes_of(nbytes).from_address(address)
    memory.tensor = tensor  # keeps it alive as long as the array
    return np.frombuffer(memory, dtype)


@lru_cache(4096)
def _bytes_of(nbytes: int) -> Any:
    """The type of so many bytes: ctypes makes it anew, in 10 µs, where nothing else refers to it."""
    return c_char * nbytes


_NAMES = {getattr(torch, name): name for name in SUPPORTED_NAMES}


@cache
def _dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """NumPy's dtype of torch's; None if numbers of that kind can only be moved."""
    name = _NAMES.get(dtype)
    return None if name is None else dtype_of(name)
