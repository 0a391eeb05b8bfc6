"""An attached model whose gradients travel in fewer bytes: by name, for all parameters or for some."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import kfcomm.torch
from kfcomm import testing
from kfcomm.compression import PowerSGD, TopK
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.torch import Compression
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")

nn = torch.nn

SIZE, STEPS = 2, 5


def made(dtype: Any = torch.float64) -> Any:
    """The same on every rank, whichever is first."""
    return filled(nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).to(dtype), 1, 0.2)


def loss(model: Any, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    return (model(x) - x[:, :8]).square().mean()


def attached(comm: Any, compression: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, kfcomm.torch.attach(model, optimizer, comm, compression=compression, **options)


def trained(comm: Any, compression: Any, **options: Any) -> list[Any]:
    model, optimizer, _ = attached(comm, compression, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, comm.rank, step).backward()
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize(
    "compression",
    [
        Compression("powersgd", rank=40, min_rate=0.01),
        Compression("topk", share=1.0),
        Compression("powersgd", begin_after=STEPS),
        Compression("float16", begin_after=STEPS),
    ],
    ids=["rank", "share", "begin_after", "rounded after"],
)
def test_lossless_compression_equals_the_plain_average(compression: Compression) -> None:
    first, second = each(lambda comm: trained(comm, compression))
    plain, _ = each(lambda comm: trained(comm, None))
    for one, other, wanted in zip(first, second, plain, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("bucket_nbytes", [1, 1 << 20], ids=["alone", "together"])
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_gradients_are_what_the_formula_makes_of_them(kind: str, defer: bool, bucket_nbytes: int) -> None:
    """As the compressor by hand, with an error of its own for each parameter."""

    def hand(name: str) -> Any:
        return TopK(0.1) if kind == "topk" else PowerSGD(2, seed=zlib.crc32(name.encode()))

    def rank(comm: Any) -> None:
        options = {"share": 0.1} if kind == "topk" else {"rank": 2}
        chosen = Compression(kind, begin_after=1, **options)
        model, optimizer, held = attached(comm, chosen, defer=defer, bucket_nbytes=bucket_nbytes)
        compressors = {bucket.name: hand(bucket.name) for bucket in held._exchange.buckets}
        for step in range(STEPS):
            own = dict(
                zip(
                    dict(model.named_parameters()),
                    torch.autograd.grad(loss(model, comm.rank, step), list(model.parameters())),
                    strict=True,
                )
            )
            optimizer.zero_grad()
            loss(model, comm.rank, step).backward()
            held.wait()
            for bucket in held._exchange.buckets:
                given = {place.name: own[place.name].numpy() for place in bucket.places}
                if step:
                    wanted = compressors[bucket.name].average(comm, given, name=f"hand/{bucket.name}")
                else:
                    wanted = comm.all_reduce_many({f"hand/{one}": array for one, array in given.items()}, op="avg")
                    wanted = {one: wanted[f"hand/{one}"] for one in given}
                for place in bucket.places:
                    np.testing.assert_allclose(place.parameter.grad.numpy(), wanted[place.name], rtol=1e-12, atol=1e-15)
            optimizer.step()
            held.wait()

    each(rank)


def test_some_parameters_by_the_patterns_of_their_names() -> None:
    chosen = {"0.weight": Compression("powersgd", rank=2), "2.*": "float16", "*": None}

    def rank(comm: Any) -> tuple[list[Any], dict[str, int]]:
        found = trained(comm, chosen)
        return found, {key.name: key.nbytes for key in comm.statistics().keys}

    (first, sent), (second, _) = each(rank)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    plain, _ = each(lambda comm: trained(comm, None))
    for one, wanted in zip(first, plain, strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=0.1)
    powers = [name for name in sent if "/p/" in name or "/q/" in name]
    assert {name.rsplit("/")[-1] for name in powers} == {"0.weight (many)"}
    assert sum(sent[name] for name in powers) == STEPS * 2 * (24 + 40) * 8
    assert {"grad/0.bias", "grad/2.bias and 1 more"} <= sent.keys(), sent


def test_compression_refuses_unknown_kinds_and_dtypes() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    narrow = made(torch.bfloat16)
    with kfcomm.sync.init() as comm:
        for compression, message in (
            ("zip", "compression 'zip' is not known; known are float16"),
            ({"weights": "topk"}, "compression for 'weights': no parameter has such a name"),
        ):
            with pytest.raises(ConfigError, match=message):
                kfcomm.torch.attach(model, optimizer, comm, compression=compression)
        with pytest.raises(ConfigError, match=r"is of torch\.bfloat16"):
            kfcomm.torch.attach(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), comm, compression="topk")
    for kind, options in (
        ("topk", {"rank": 2}),
        ("float16", {"rank": 2}),
        ("powersgd", {"rank": 0}),
        ("topk", {"share": 2.0}),
    ):
        with pytest.raises(ConfigError):
            Compression(kind, **options)


def test_ranks_that_compress_differently() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"compression of 0.weight is .*powersgd.* on rank 0, and .*topk.* on rank 1"
        ):
            attached(comm, "topk" if comm.rank else "powersgd")

    each(rank)


def test_a_failure_reaches_whoever_waits() -> None:
    def rank(comm: Any) -> None:
        model, optimizer, held = attached(comm, "powersgd")
        loss(model, comm.rank, 0).backward()
        optimizer.step()
        held.wait()
        if comm.rank:
            return
        with pytest.raises(KfcommError):
            loss(model, comm.rank, 1).backward()

    with testing.sync_world(SIZE) as comms:
        both = testing.run_threads(comms, lambda comm: (rank(comm), comm.close() if comm.rank else None))
    assert len(both) == SIZE
