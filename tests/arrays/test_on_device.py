"""Arrays in device memory: which they are, what is refused, and how any library joins in through one attribute."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays import adapt, adapt_out, dtype_of
from kfcomm.arrays.devices import DeviceReport
from kfcomm.arrays.on_device import (
    OnStream,
    adapt_device,
    adapt_device_out,
    current_stream,
    is_on_device,
    overlaps,
)
from kfcomm.errors import ConfigError

FLOAT = np.dtype(np.float32)


class TinyKind:
    """A library of this test: its arrays are NumPy's in a wrapper, its streams are words."""

    name = "tiny array"

    def ordinal(self, x: Tiny) -> int:
        return x.ordinal

    def current_stream(self, x: Tiny) -> str:
        return "current"

    def stream_of(self, given: Any, device: Any) -> str:
        if not isinstance(given, str):
            raise ConfigError(f"{given!r} is not a stream")
        return given

    def read(self, x: Tiny, stream: str) -> tuple[Any, np.dtype]:
        x.seen.append(("read", stream))
        return x.memory, x.memory.dtype

    def check_writable(self, out: Tiny) -> None:
        if not out.memory.flags.writeable:
            raise ConfigError("out is read-only")

    def written(self, out: Tiny) -> None:
        pass

    def flat_view(self, native: np.ndarray) -> np.ndarray | None:
        return native.reshape(-1) if native.flags.c_contiguous else None

    def pack(self, native: np.ndarray, stream: str) -> np.ndarray:
        return native.flatten(order="C")

    def copy_into(self, native: np.ndarray, flat: np.ndarray, stream: str) -> None:
        native[...] = flat.reshape(native.shape)

    def restore(self, flat: np.ndarray, shape: tuple[int, ...], stream: str) -> Tiny:
        return Tiny(flat.reshape(shape), seen=[("made", stream)])

    def span(self, flat: np.ndarray) -> tuple[int, int]:
        address = flat.__array_interface__["data"][0]
        return address, address + flat.nbytes


@dataclass
class Tiny:
    """An array of it."""

    __kfcomm_kind__ = TinyKind()
    memory: np.ndarray
    ordinal: int = 0
    seen: list[Any] = field(default_factory=list)


class TinyDevice:
    """A device of that library, with the members that adapting needs."""

    ordinal = 0
    report = DeviceReport(kind="tiny", model="as small as can be")

    def empty(self, count: int, dtype: np.dtype, stream: str) -> np.ndarray:
        return np.zeros(count, dtype)


def tiny(*shape: int, dtype: Any = FLOAT) -> Tiny:
    return Tiny(np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape))


def taken(x: Any, stream: Any = None) -> Any:
    return adapt_device(x, TinyDevice(), stream)  # type: ignore[arg-type]


def place(out: Any, shape: tuple[int, ...], dtype: Any = FLOAT, stream: Any = None) -> Any:
    return adapt_device_out(out, shape, np.dtype(dtype), TinyDevice(), stream)  # type: ignore[arg-type]


class OnCuda:
    """An array of an unknown library in CUDA memory, by its interface alone."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "version": 3, "data": (4096, False)}  # noqa: RUF012


class Dlpack:
    """An array of an unknown library that speaks DLPack, on a device of some type."""

    def __init__(self, device_type: int) -> None:
        self.device_type = device_type

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not here")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0


# --- recognition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [tiny(2), OnStream(tiny(2), "mine"), OnCuda(), Dlpack(2), Dlpack(13)])
def test_arrays_on_a_device(x: Any) -> None:
    assert is_on_device(x)


@pytest.mark.parametrize(
    "x",
    [
        *(np.ones(2), np.float32(1), 1, 1.5, [1, 2], (1, 2), b"12", bytearray(2), memoryview(b"12"), None, "text"),
        *({}, object(), Dlpack(1), Dlpack(3), Dlpack(10), OnStream(np.ones(2), "mine")),
    ],
)
def test_arrays_in_host_memory_are_not_on_a_device(x: Any) -> None:
    assert not is_on_device(x)
    with pytest.raises(ConfigError, match="expected an array in the memory of a device"):
        taken(x)


def test_a_library_is_recognised_by_its_type_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class ndarray:  # noqa: N801
        device = SimpleNamespace(id=1)

    module = ModuleType("cupy")
    module.ndarray = ndarray  # type: ignore[attr-defined]
    assert not is_on_device(ndarray())
    monkeypatch.setitem(sys.modules, "cupy", module)
    assert is_on_device(ndarray())
    with pytest.raises(ConfigError, match=r"a CuPy array on cuda:1 cannot be exchanged by this verb.*pass x.get\(\)"):
        adapt(ndarray())


def test_host_verbs_refuse_device_arrays_with_a_remedy() -> None:
    for use in (adapt, lambda x: adapt_out(x, (2,), FLOAT)):
        with pytest.raises(ConfigError, match=r"a tiny array on a device .*: pass a copy .* all_reduce, .* all_to_all"):
            use(tiny(2))


def test_missing_cupy_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for x in (OnCuda(), Dlpack(2)):
        for use in (taken, current_stream):
            with pytest.raises(ConfigError, match=r"need CuPy .*kfcomm\[cuda13\]"):
                use(x)


# --- in ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
@pytest.mark.parametrize("name", ["float32", "bool", "bfloat16", "complex128"])
def test_contiguous_arrays_are_not_copied(name: str, shape: tuple[int, ...]) -> None:
    x = tiny(*shape, dtype=dtype_of(name))
    array = taken(x)
    assert (array.shape, array.dtype, array.stream) == (shape, dtype_of(name), "current")
    assert array.flat.shape == (x.memory.size,)
    assert np.shares_memory(array.flat, x.memory) == (x.memory.size > 0)
    back = array.restore(array.flat)
    assert type(back) is Tiny
    assert back.memory.shape == shape


def test_others_are_packed_once() -> None:
    x = tiny(3, 4)
    turned = Tiny(x.memory.T)
    array = taken(turned)
    assert array.shape == (4, 3)
    assert array.flat.tolist() == x.memory.T.flatten().tolist()
    assert not np.shares_memory(array.flat, x.memory)


def test_another_shape_for_the_result() -> None:
    assert taken(tiny(2, 3)).restore(np.zeros(12, FLOAT), (2, 2, 3)).memory.shape == (2, 2, 3)


def test_a_type_that_is_not_exchanged() -> None:
    with pytest.raises(ConfigError, match=r"dtype datetime64.* is not supported"):
        taken(Tiny(np.zeros(2, "M8[s]")))


def test_on_another_device() -> None:
    x = Tiny(np.zeros(2, FLOAT), ordinal=1)
    message = r"a tiny array on tiny:1 .* uses tiny:0 \(as small as can be\); .* device='tiny:1'"
    with pytest.raises(ConfigError, match=message):
        taken(x)
    with pytest.raises(ConfigError, match=message):
        place(x, (2,))
    assert not x.seen
    assert taken(Tiny(np.zeros(0, FLOAT), ordinal=-1)).flat.size == 0  # nowhere, which is as good as anywhere


# --- streams ----------------------------------------------------------------------------------------------------------


def test_the_stream_is_the_library_s_own_unless_it_is_named() -> None:
    x = tiny(2)
    assert current_stream(x) == "current"
    assert taken(x).stream == "current"
    assert taken(x, "named").stream == "named"
    assert x.seen == [("read", "current"), ("read", "named")]
    assert taken(x, "named").restore(np.zeros(2, FLOAT)).seen == [("made", "named")]


def test_a_stream_that_came_with_the_array() -> None:
    x = OnStream(tiny(2), "before")
    assert current_stream(x) == "before"
    assert taken(x).stream == "before"
    assert taken(x, "named").stream == "named"
    assert place(x, (2,)).stream == "before"


def test_invalid_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="is not a stream"):
        taken(tiny(2), 7)


# --- out --------------------------------------------------------------------------------------------------------------


def test_contiguous_memory_is_written_in_place() -> None:
    out = tiny(3, 4)
    made = place(out, (3, 4))
    made.flat[:] = 7
    assert made.target is None
    assert made.finish() is out
    assert (out.memory == 7).all()


def test_other_memory_is_written_in_the_end() -> None:
    whole = tiny(3, 4)
    out = Tiny(whole.memory[:, ::2])
    made = place(out, (3, 2))
    made.flat[:] = 7
    assert not (out.memory == 7).any()
    assert made.finish() is out
    assert whole.memory.tolist() == [[7, 1, 7, 3], [7, 5, 7, 7], [7, 9, 7, 11]]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (tiny(2), r"out has shape \(2,\), the result has \(3,\)"),
        (tiny(3, dtype="f8"), "out has dtype float64, the result has float32"),
        (Tiny(np.broadcast_to(np.float32(0), 3)), "read-only"),
        (Tiny(np.lib.stride_tricks.as_strided(np.zeros(1, FLOAT), (3,), (0,))), "share their memory"),
        (np.zeros(3), "expected an array in the memory of a device"),
    ],
)
def test_bad_out(out: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(out, (3,))


def test_partial_overlap_is_detected() -> None:
    x = tiny(8)
    array = taken(x)
    assert not overlaps(array, place(x, (8,)))
    assert not overlaps(array, place(tiny(8), (8,)))
    assert overlaps(array, place(Tiny(x.memory[1:5]), (4,)))
    assert not overlaps(taken(Tiny(x.memory[:4])), place(Tiny(x.memory[4:]), (4,)))
