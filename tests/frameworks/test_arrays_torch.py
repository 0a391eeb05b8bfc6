"""torch tensors in and out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.arrays import adapt, adapt_out, dtype_name, dtype_of, overlaps, same_memory
from kfcomm.arrays.dtypes import SUPPORTED_NAMES
from kfcomm.errors import ConfigError

torch = pytest.importorskip("torch")

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T,
    "strided": lambda t: t[:, ::2],
    "row": lambda t: t[1],
    "number": lambda t: t[1, 1],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[:, :1].expand(3, 5),
    "channels last": lambda t: t.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
}


def matrix(name: str) -> Any:
    return torch.arange(12).reshape(3, 4).to(getattr(torch, name))


def numbers(tensor: Any) -> np.ndarray:
    """The elements of a tensor in C order, read without any of our code."""
    wide = tensor.detach().to(torch.float32) if tensor.dtype is torch.bfloat16 else tensor.detach()
    return wide.resolve_conj().resolve_neg().numpy().flatten()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_round_trip(name: str, layout: Any) -> None:
    x = layout(matrix(name))
    host = adapt(x)
    assert (dtype_name(host.dtype), host.shape) == (name, tuple(x.shape))
    assert np.array_equal(host.flat.astype(numbers(x).dtype), numbers(x))
    assert host.is_view == x.is_contiguous()
    back = host.restore(host.flat.copy())
    assert type(back) is torch.Tensor
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert torch.equal(back, x)


@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_no_copies(name: str) -> None:
    x = matrix(name)
    host = adapt(x)
    assert host.flat.__array_interface__["data"][0] == x.data_ptr()
    assert same_memory(adapt(x).flat, host.flat)
    assert overlaps(adapt(x[:2]).flat, adapt(x[1:]).flat)
    result = host.flat.copy()
    assert host.restore(result).data_ptr() == result.__array_interface__["data"][0]


def test_a_read_only_result_is_copied() -> None:
    host = adapt(torch.zeros(3))
    host.flat.flags.writeable = False
    assert host.restore(host.flat).data_ptr() != host.flat.__array_interface__["data"][0]


def test_another_shape_for_the_result() -> None:
    stacked = adapt(matrix("bfloat16")).restore(np.zeros(24, dtype_of("bfloat16")), (2, 3, 4))
    assert (stacked.shape, stacked.dtype) == ((2, 3, 4), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_flow_through(dtype: Any) -> None:
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    for tensor in (x, x * 2, torch.nn.Parameter(torch.ones(3, dtype=dtype))):
        back = adapt(tensor).restore(adapt(tensor).flat.copy())
        assert type(back) is torch.Tensor
        assert not back.requires_grad
        assert torch.equal(back, tensor.detach())


def test_lazily_conjugated_and_negated_tensors() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    assert adapt(x.conj()).flat.tolist() == [1 - 2j, 3 + 1j]
    assert adapt(x.conj().imag).flat.tolist() == [-2, 1]
    for out in (x.conj(), x.conj().imag):
        with pytest.raises(ConfigError, match="lazily"):
            adapt_out(out, (2,), adapt(out).dtype)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "complex32"])
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_other_dtypes_are_refused(name: str) -> None:
    x = torch.zeros(2, dtype=getattr(torch, name))
    with pytest.raises(ConfigError, match=rf"torch.{name} is not supported; supported are"):
        adapt(x)
    with pytest.raises(ConfigError, match="not supported"):
        adapt_out(x, (2,), np.dtype("float32"))


def test_bfloat16_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype_of.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ConfigError, match=r'pip install "kfcomm\[bfloat16\]"'):
        adapt(torch.zeros(2, dtype=torch.bfloat16))


def test_devices_and_layouts_are_refused() -> None:
    for use in (adapt, lambda x: adapt_out(x, (2,), np.dtype("float32"))):
        with pytest.raises(ConfigError, match=r"a torch tensor on meta cannot be exchanged by .*: pass x.cpu\(\)"):
            use(torch.zeros(2, device="meta"))
        with pytest.raises(ConfigError, match=r"layout torch.sparse_coo cannot be exchanged: pass x.to_dense\(\)"):
            use(torch.zeros(2).to_sparse())


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_inside_a_transformation(name: str) -> None:
    with pytest.raises(ConfigError, match="the memory of a torch tensor cannot be read"):
        torch.func.vmap(lambda x: adapt(x).size)(matrix(name))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "row", "number", "empty"])
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
def test_out(name: str, layout: str) -> None:
    base = torch.zeros(3, 4, dtype=getattr(torch, name))
    out = LAYOUTS[layout](base)
    place = adapt_out(out, tuple(out.shape), dtype_of(name))
    place.flat[:] = np.arange(1, out.numel() + 1).astype(place.flat.dtype)
    assert place.finish() is out
    assert np.array_equal(
        numbers(out), np.arange(1, out.numel() + 1).astype(place.flat.dtype).astype(numbers(out).dtype)
    )


def test_out_that_requires_gradients_is_written() -> None:
    out = torch.nn.Parameter(torch.zeros(2))
    place = adapt_out(out, (2,), np.dtype("float32"))
    place.flat[:] = 3
    assert place.finish() is out
    assert out.tolist() == [3, 3]


def test_bad_out() -> None:
    with pytest.raises(ConfigError, match="out has dtype float64, the result has float32"):
        adapt_out(torch.zeros(2, dtype=torch.float64), (2,), np.dtype("float32"))
    with pytest.raises(ConfigError, match=r"out has shape \(2,\), the result has \(3,\)"):
        adapt_out(torch.zeros(2), (3,), np.dtype("float32"))
    with pytest.raises(ConfigError, match="share their memory"):
        adapt_out(torch.zeros(1).expand(3), (3,), np.dtype("float32"))
