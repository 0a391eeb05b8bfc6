"""CUDA kernels that fold the contributions of several ranks, or copy them, in one piece of work: their source, by CuPy.

Invariants: a fold gives the bits of `kfcomm.arrays.reduce`, elements folded in the order of the sources: NaN included,
as x86 has it (the first of two, made quiet; a new one is negative). Integers wrap around. float16 and bfloat16 are
summed and multiplied in float32 and rounded once. Nothing is fused: every product and sum is rounded by itself.

This module imports no library; a `Kernels` compiles by CuPy, which needs NVRTC, and keeps what it has compiled on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np

from kfcomm.arrays.dtypes import dtype_name
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.types import Op

MAX_PAIRS: Final = 16
"""Pairs of one copy kernel."""
THREADS: Final = 256
MAX_BLOCKS: Final = 1024
"""Enough to fill the largest device: each thread goes on with what is left."""

_BITS: Final = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;

__device__ __forceinline__ float quiet(float x) { return __uint_as_float(__float_as_uint(x) | 0x00400000u); }
__device__ __forceinline__ double quiet(double x) {
  return __longlong_as_double(__double_as_longlong(x) | 0x0008000000000000ll);
}
__device__ __forceinline__ float fresh(float) { return __uint_as_float(0xffc00000u); }
__device__ __forceinline__ double fresh(double) { return __longlong_as_double(0xfff8000000000000ll); }

// The device knows one NaN only: which one the host would have is found out here.
template <typename F> __device__ __forceinline__ F settled(F a, F b, F r) {
  return r == r ? r : a != a ? quiet(a) : b != b ? quiet(b) : fresh(r);
}
__device__ __forceinline__ float add(float a, float b) { return settled(a, b, __fadd_rn(a, b)); }
__device__ __forceinline__ double add(double a, double b) { return settled(a, b, __dadd_rn(a, b)); }
__device__ __forceinline__ float sub(float a, float b) { return settled(a, b, __fsub_rn(a, b)); }
__device__ __forceinline__ double sub(double a, double b) { return settled(a, b, __dsub_rn(a, b)); }
__device__ __forceinline__ float mul(float a, float b) { return settled(a, b, __fmul_rn(a, b)); }
__device__ __forceinline__ double mul(double a, double b) { return settled(a, b, __dmul_rn(a, b)); }
__device__ __forceinline__ float over(float a, float b) { return settled(a, b, __fdiv_rn(a, b)); }
__device__ __forceinline__ double over(double a, double b) { return settled(a, b, __ddiv_rn(a, b)); }

// NaN wins, the first of two; of equal numbers the second is taken, which tells zeros apart.
template <typename F> __device__ __forceinline__ F least(F a, F b) { return a != a ? a : a < b ? a : b; }
template <typename F> __device__ __forceinline__ F most(F a, F b) { return a != a ? a : a > b ? a : b; }

template <typename F> struct alignas(2 * sizeof(F)) Complex { F re, im; };
template <typename F> __device__ __forceinline__ Complex<F> add(Complex<F> a, Complex<F> b) {
  return {add(a.re, b.re), add(a.im, b.im)};
}
template <typename F> __device__ __forceinline__ Complex<F> mul(Complex<F> a, Complex<F> b) {
  return {sub(mul(a.re, b.re), mul(a.im, b.im)), add(mul(a.re, b.im), mul(a.im, b.re))};
}
template <typename F> __device__ __forceinline__ Complex<F> over(Complex<F> a, F b) {
  return {over(a.re, b), over(a.im, b)};
}

// Half precision: widened by its bits, so that no header is needed.
__device__ __forceinline__ float of_bfloat16(u16 h) { return __uint_as_float((u32)h << 16); }
__device__ __forceinline__ u16 to_bfloat16(float x) {
  u32 bits = __float_as_uint(x);
  if (x != x) return (bits >> 31) ? 0xffc0 : 0x7fc0;
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ float of_float16(u16 h) {
  if ((h & 0x7c00) == 0x7c00 && (h & 0x3ff)) {
    return __uint_as_float(((u32)(h & 0x8000) << 16) | 0x7fc00000u | ((u32)(h & 0x3ff) << 13));
  }
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ u16 to_float16(float x) {
  u32 bits = __float_as_uint(x);
  if (x != x) return (u16)(((bits >> 16) & 0x8000u) | 0x7e00u | ((bits >> 13) & 0x3ffu));
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
// As integers the magnitudes of negative numbers are inverted, so that halves compare as numbers.
__device__ __forceinline__ short ordered(u16 h) { return (short)h ^ (((short)h >> 15) & 0x7fff); }
template <int INF> __device__ __forceinline__ bool is_nan(u16 h) { return (h & 0x7fff) > INF; }
template <int INF> __device__ __forceinline__ u16 least_half(u16 a, u16 b) {
  return is_nan<INF>(a) ? a : is_nan<INF>(b) ? b : ordered(a) < ordered(b) ? a : b;
}
template <int INF> __device__ __forceinline__ u16 most_half(u16 a, u16 b) {
  return is_nan<INF>(a) ? a : is_nan<INF>(b) ? b : ordered(a) > ordered(b) ? a : b;
}
"""


class _Element(NamedTuple):
    """How elements of one dtype are stored, and folded."""

    stored: str  # type in memory
    folded: str  # type of partial results
    widen: str = "{}"
    narrow: str = "{}"
    whole: str = ""  # of integers: unsigned type, in which sums wrap around


_ELEMENTS: Final = {
    "bool": _Element("u8", "u8", whole="u8"),
    "int8": _Element("signed char", "signed char", whole="u8"),
    "uint8": _Element("u8", "u8", whole="u8"),
    "int16": _Element("short", "short", whole="u16"),
    "uint16": _Element("u16", "u16", whole="u16"),
    "int32": _Element("int", "int", whole="u32"),
    "uint32": _Element("u32", "u32", whole="u32"),
    "int64": _Element("long long", "long long", whole="u64"),
    "uint64": _Element("u64", "u64", whole="u64"),
    "float32": _Element("float", "float"),
    "float64": _Element("double", "double"),
    "complex64": _Element("Complex<float>", "Complex<float>"),
    "complex128": _Element("Complex<double>", "Complex<double>"),
    "float16": _Element("u16", "float", "of_float16({})", "to_float16({})"),
    "bfloat16": _Element("u16", "float", "of_bfloat16({})", "to_bfloat16({})"),
}
_INFINITY: Final = {"float16": "0x7c00", "bfloat16": "0x7f80"}
_SIGNS: Final = {Op.SUM: "+", Op.PROD: "*", Op.AND: "&", Op.OR: "|", Op.XOR: "^"}
_ORDERS: Final = {Op.MIN: "least", Op.MAX: "most"}


def fold_source(op: Op, dtype: np.dtype[Any], size: int) -> str:
    """CUDA C++ of a kernel ``fold(source 0, ..., target, count)`` for so many sources."""
    name = dtype_name(dtype)
    element = _ELEMENTS[name]
    if op in _ORDERS and name in _INFINITY:  # compared as they are stored
        element = _Element("u16", "u16")
    combine = _combination(op, name, element)
    divided = f"over(acc, ({_part(element)}){size})" if op is Op.AVG else "acc"
    numbers = range(size)
    given = ", ".join(f"const S* s{n}" for n in numbers)
    folds = "\n    ".join(f"acc = combine(acc, {element.widen.format(f'x{n}')});" for n in numbers[1:])
    return f"""{_BITS}
typedef {element.stored} S;
typedef {element.folded} A;
const int PACK = 16 / sizeof(S);
struct alignas(16) Pack {{ S of[PACK]; }};

__device__ __forceinline__ A combine(A a, A b) {{ return {combine}; }}
__device__ __forceinline__ S all({", ".join(f"S x{n}" for n in numbers)}) {{
    A acc = {element.widen.format("x0")};
    {folds}
    acc = {divided};
    return {element.narrow.format("acc")};
}}
extern "C" __global__ void fold({given}, S* out, long long count) {{
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
  long long done = 0;
  if ((({" | ".join(f"(u64)s{n}" for n in numbers)} | (u64)out) & 15) == 0) {{
    const long long packs = count / PACK;
    for (long long i = at; i < packs; i += step) {{
      {" ".join(f"const Pack p{n} = ((const Pack*)s{n})[i];" for n in numbers)}
      Pack y;
#pragma unroll
      for (int k = 0; k < PACK; ++k) y.of[k] = all({", ".join(f"p{n}.of[k]" for n in numbers)});
      ((Pack*)out)[i] = y;
    }}
    done = packs * PACK;
  }}
  for (long long i = done + at; i < count; i += step) out[i] = all({", ".join(f"s{n}[i]" for n in numbers)});
}}
"""


def _part(element: _Element) -> str:
    """Type of a number that divides partial results."""
    return element.folded.removeprefix("Complex<").removesuffix(">")


def _combination(op: Op, name: str, element: _Element) -> str:
    if op in _ORDERS:
        return f"{_ORDERS[op]}_half<{_INFINITY[name]}>(a, b)" if name in _INFINITY else f"{_ORDERS[op]}(a, b)"
    if element.whole:
        # a product of two 16-bit numbers would be one of int, which does not wrap around
        wide = "u64" if element.whole == "u64" else "u32"
        return f"({element.folded})({element.whole})(({wide})a {_SIGNS[op]} ({wide})b)"
    return "mul(a, b)" if op is Op.PROD else "add(a, b)"


def copy_source(number: int) -> str:
    """CUDA C++ of a kernel ``copies(source 0, target 0, bytes 0, ...)`` for so many pairs, a row of blocks for each."""
    given = ", ".join(f"const u8* s{n}, u8* t{n}, long long n{n}" for n in range(number))
    chosen = "\n  ".join(
        f"{'else ' if n else ''}if (blockIdx.y == {n}) {{ s = s{n}; t = t{n}; n = n{n}; }}" for n in range(number)
    )
    return f"""
typedef unsigned char u8; typedef unsigned long long u64;
struct alignas(16) Pack {{ u64 of[2]; }};

template <typename U> __device__ __forceinline__ void copied(const u8* s, u8* t, long long n) {{
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n / (long long)sizeof(U); i += step)
    ((U*)t)[i] = ((const U*)s)[i];
}}
extern "C" __global__ void copies({given}) {{
  const u8* s = 0; u8* t = 0; long long n = 0;
  {chosen}
  const u64 all = (u64)s | (u64)t | (u64)n;
  if ((all & 15) == 0) copied<Pack>(s, t, n);
  else if ((all & 3) == 0) copied<unsigned int>(s, t, n);
  else copied<u8>(s, t, n);
}}
"""


class Kernels:
    """Compiled kernels of one device, each made once. They run on CuPy's current device. For one thread at a time."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._folds: dict[tuple[Op, np.dtype[Any], int], _Kernel] = {}
        self._copies: dict[int, _Kernel] = {}

    def prepare(self) -> None:
        """Compile the first kernel.

        Raises:
            ConfigError: none can be compiled here.
        """
        self._copies[2] = self._compiled(copy_source(2), "copies", 6)

    def fold(
        self, op: Op, dtype: np.dtype[Any], sources: Sequence[int], target: int, count: int, stream: int
    ) -> None:  # fmt: skip
        """Fold ``count`` elements at some addresses into those at another, on the stream with this number.

        Raises:
            ConfigError: the kernel cannot be compiled here.
        """
        key = (op, dtype, len(sources))
        kernel = self._folds.get(key)
        if kernel is None:
            kernel = self._folds[key] = self._compiled(fold_source(*key), "fold", len(sources) + 2)
        kernel.launch(_blocks(count * dtype.itemsize), 1, stream, [*sources, target, count])

    def copy(self, pairs: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Copy from addresses to others so many bytes, on the stream with this number.

        Raises:
            ConfigError: the kernel cannot be compiled here.
        """
        for first in range(0, len(pairs), MAX_PAIRS):
            some = pairs[first : first + MAX_PAIRS]
            kernel = self._copies.get(len(some))
            if kernel is None:
                kernel = self._copies[len(some)] = self._compiled(copy_source(len(some)), "copies", 3 * len(some))
            longest = max(nbytes for *_, nbytes in some)
            kernel.launch(_blocks(longest), len(some), stream, list(chain.from_iterable(some)))

    def _compiled(self, source: str, name: str, num_arguments: int) -> _Kernel:
        try:
            kernel = self._cupy.RawKernel(source, name, options=("--std=c++14", "--fmad=false"))
            kernel.compile()
            return _Kernel(self._cupy, kernel, num_arguments)
        except (KfcommError, self._cupy.cuda.runtime.CUDARuntimeError, MemoryError):
            raise
        except Exception as error:  # CuPy's error depends on the step that fails
            raise ConfigError(f"a kernel cannot be compiled here: {error}") from error


class _Kernel:
    """A compiled kernel whose arguments are numbers of 64 bits.

    Launched by the driver's function: CuPy's own way takes 10 µs more, most of it to look at the arguments.
    """

    __slots__ = ("_address", "_function", "_launch", "_pointers", "_values")

    def __init__(self, cupy: Any, kernel: Any, num_arguments: int) -> None:
        self._launch = cupy.cuda.driver.launchKernel
        self._function: int = kernel.kernel.ptr
        # They are read during the launch.
        self._values = np.empty(num_arguments, np.uint64)
        self._pointers = self._values.ctypes.data + 8 * np.arange(num_arguments, dtype=np.uint64)
        self._address = self._pointers.ctypes.data

    def launch(self, blocks: int, rows: int, stream: int, arguments: list[int]) -> None:
        self._values[:] = arguments
        self._launch(self._function, blocks, rows, 1, THREADS, 1, 1, 0, stream, self._address, 0)


def _blocks(nbytes: int) -> int:
    return max(1, min(-(-nbytes // (16 * THREADS)), MAX_BLOCKS))
