"""Calls of CUDA through CuPy: the current device and stream, and errors.

Invariants: CuPy is imported by calls of this module, and not before. During a call the device is the thread's current
one, which every thread has of its own. Errors of CUDA become `TransportError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

from kfcomm.arrays.devices.base import Stream
from kfcomm.errors import ConfigError, TransportError

INSTALL: Final = 'pip install "kfcomm[cuda13]", or "kfcomm[cuda12]" where the driver is older than CUDA 13'

_PER_THREAD_STREAM: Final = 2
"""CUDA's number for the default stream of the calling thread."""


def load_cupy() -> Any:
    """The module ``cupy``.

    Raises:
        ConfigError: it is not installed, or cannot be loaded; the message says what to install.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"arrays in the memory of a GPU need CuPy ({error}): {INSTALL}") from error
    return cupy


@contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """Turn errors of CUDA in the block into a `TransportError` that begins with ``what``."""
    refused = load_cupy().cuda.runtime.CUDARuntimeError
    try:
        yield
    except refused as error:
        raise TransportError(f"{what}: {error}") from error


class working_on:  # noqa: N801
    """Make a device the thread's current one, and a stream CuPy's current one, in the block; map CUDA's errors.

    A class and not a generator, which saves about 1 µs per use.

    Args:
        ordinal: of the device.
        stream: CuPy's; if left out, the current one stays.

    Raises:
        TransportError: CUDA reports an error.
    """

    __slots__ = ("_device", "_refused", "_stream", "_what")

    def __init__(self, ordinal: int, stream: Stream | None = None) -> None:
        cuda = load_cupy().cuda
        self._what = f"cuda:{ordinal}"
        self._device = cuda.Device(ordinal)
        self._stream = stream
        self._refused = cuda.runtime.CUDARuntimeError

    def __enter__(self) -> None:
        try:
            self._device.__enter__()
        except self._refused as error:
            raise TransportError(f"{self._what}: {error}") from error
        # A block that was not entered is not left either: the device is restored here.
        try:
            if self._stream is not None:
                self._stream.__enter__()
        except BaseException:
            self._device.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, traceback)
        self._device.__exit__(kind, error, traceback)
        if isinstance(error, self._refused):
            raise TransportError(f"{self._what}: {error}") from error


def as_stream(given: Any) -> Stream:
    """A stream as CuPy's, which keeps alive what was given.

    Args:
        given: a stream of CuPy or torch, an object with ``__cuda_stream__``, or CUDA's own number of one, which its
            owner keeps alive.

    Raises:
        ConfigError: it is of another type, or the default stream of the calling thread.
    """
    cuda = load_cupy().cuda
    if isinstance(given, cuda.Stream):
        stream = given
    else:
        stream = cuda.Stream.from_external(_Foreign(given))
    if stream.ptr == _PER_THREAD_STREAM:
        raise ConfigError("the default stream of a thread cannot be used by another: pass stream= a stream of its own")
    return stream


class _Foreign:
    """A stream of another library, or of CUDA itself, as CuPy takes it."""

    __slots__ = ("_given", "_pointer")

    def __init__(self, given: Any) -> None:
        self._given = given
        self._pointer = _pointer_of(given)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def _pointer_of(given: Any) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if hasattr(given, "__cuda_stream__"):
        protocol = given.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    if hasattr(given, "cuda_stream"):  # torch's, before it had the protocol
        return int(given.cuda_stream)
    raise ConfigError(
        f"stream= takes a stream of CuPy or torch, an object with __cuda_stream__, or a CUDA stream by its number; "
        f"not {given!r}"
    )
