"""Kernels for CUDA as text, and how they are compiled and launched; their bits are compared on a GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices.kernels import MAX_BLOCKS, MAX_PAIRS, THREADS, Kernels, copy_source, fold_source
from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of
from kfcomm.arrays.reduce import supports
from kfcomm.errors import ConfigError
from kfcomm.types import Op

FLOAT = np.dtype(np.float32)


class StubCupy:
    """Records what is compiled and launched; the arguments of a launch are those that CUDA would read."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.compiled: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        driver = SimpleNamespace(launchKernel=self._launch)
        self.cuda = SimpleNamespace(driver=driver, runtime=SimpleNamespace(CUDARuntimeError=ZeroDivisionError))

    def RawKernel(self, source: str, name: str, options: tuple[str, ...]) -> Any:  # noqa: N802  as in CuPy
        assert f'extern "C" __global__ void {name}(' in source
        assert "--fmad=false" in options
        return SimpleNamespace(compile=lambda: self._compile(source), kernel=SimpleNamespace(ptr=len(self.compiled)))

    def _compile(self, source: str) -> None:
        if self.error is not None:
            raise self.error
        self.compiled.append(source)

    def _launch(self, function: int, *rest: int) -> None:
        *shape, stream, arguments, extra = rest
        number = self.compiled[function].split("__global__ void")[1].split(")")[0].count(",") + 1
        pointers = (ctypes.c_uint64 * number).from_address(arguments)
        values = [ctypes.c_uint64.from_address(one).value for one in pointers]
        assert shape[2:] == [1, THREADS, 1, 1, 0]
        assert not extra
        self.launched.append((function, shape[0], shape[1], stream, values))


@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_every_op_has_a_kernel_for_every_dtype_that_it_takes(name: str) -> None:
    dtype = dtype_of(name)
    for op in Op:
        if supports(op, dtype):
            for size in (2, 16):
                source = fold_source(op, dtype, size)
                assert source.count("{") == source.count("}")
                assert f"s{size - 1}[i]" in source
                assert f"s{size}" not in source


def test_a_kernel_is_compiled_once() -> None:
    cupy = StubCupy()
    kernels = Kernels(cupy)
    for _ in range(2):
        kernels.fold(Op.SUM, FLOAT, [1000, 2000], 3000, 5, 7)
        kernels.fold(Op.MAX, FLOAT, [1000, 2000, 3000], 4000, 1 << 30, 8)
    assert len(cupy.compiled) == 2
    assert cupy.launched[:2] == [
        (0, 1, 1, 7, [1000, 2000, 3000, 5]),
        (1, MAX_BLOCKS, 1, 8, [1000, 2000, 3000, 4000, 1 << 30]),
    ]
    assert cupy.launched[2:] == cupy.launched[:2]


def test_copies_share_a_kernel() -> None:
    cupy = StubCupy()
    kernels = Kernels(cupy)
    kernels.prepare()
    kernels.copy([(1, 2, 300), (4, 5, 60_000)], 7)
    assert cupy.launched == [(0, 15, 2, 7, [1, 2, 300, 4, 5, 60_000])]
    cupy.launched.clear()
    kernels.copy([(n, n + 1, 16) for n in range(MAX_PAIRS + 3)], 7)
    assert [rows for _, _, rows, *_ in cupy.launched] == [MAX_PAIRS, 3]
    assert f"blockIdx.y == {MAX_PAIRS - 1}" in copy_source(MAX_PAIRS)


def test_a_kernel_that_cannot_be_compiled_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be compiled here: no NVRTC"):
        Kernels(StubCupy(OSError("no NVRTC"))).prepare()
    with pytest.raises(MemoryError):
        Kernels(StubCupy(MemoryError())).prepare()
