"""K-FAC in torch: gradients as the formulas give them from the gradients of single samples, on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kfcomm.torch
from kfcomm.errors import ConfigError
from tests.frameworks.ranks import each, filled

torch = pytest.importorskip("torch")
nn = torch.nn

DAMPING = 0.05


def model() -> Any:
    made = nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, padding="same", bias=False),
        nn.BatchNorm2d(4).eval(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1, bias=False),
    )  # fmt: skip
    return filled(made.double(), 0, 0.4)


def batch(rank: int, step: int, count: int = 6) -> Any:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def covariances(made: Any, x: Any) -> dict[str, tuple[Any, Any]]:
    """By the definition: from the gradients of each sample's own loss, without any hook of ours."""
    sums: dict[str, list[Any]] = {}
    for sample in x:
        seen: dict[str, Any] = {}
        hooks = [
            module.register_forward_hook(
                lambda _, given, out, name=name, seen=seen: seen.update({name: (given[0], out)})
            )
            for name, module in made.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv2d))
        ]
        loss = made(sample[None]).square().mean()
        for hook in hooks:
            hook.remove()
        found = torch.autograd.grad(loss, [out for _, out in seen.values()])
        for (name, (given, _)), gradient in zip(seen.items(), found, strict=True):
            module = made.get_submodule(name)
            if isinstance(module, nn.Conv2d):
                rows = patches(module, given[0])
                back = gradient[0].flatten(1).T
            else:
                rows, back = given, gradient
            if module.bias is not None:
                rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], dim=1)
            outer, inner = back.T @ back / len(back), rows.T @ rows
            kept = sums.setdefault(name, [0, 0])
            sums[name] = [kept[0] + outer / len(x), kept[1] + inner.detach() / len(x)]
    return {name: (outer.numpy(), inner.numpy()) for name, (outer, inner) in sums.items()}


def patches(module: Any, image: Any) -> Any:
    """Rows of a convolution's inputs, cut out place by place."""
    high, wide = module.kernel_size
    image = nn.functional.pad(image, (1, 1, 1, 1))
    rows = [
        image[:, top : top + high, left : left + wide].flatten()
        for top in range(0, image.shape[1] - high + 1, module.stride[0])
        for left in range(0, image.shape[2] - wide + 1, module.stride[1])
    ]
    return torch.stack(rows)


def preconditioned(module: Any, outer: Any, inner: Any) -> tuple[Any, Any]:
    gradient = module.weight.grad.flatten(1)
    if module.bias is not None:
        gradient = torch.cat([gradient, module.bias.grad[:, None]], dim=1)
    left = np.linalg.inv(outer + DAMPING * np.eye(len(outer)))
    right = np.linalg.inv(inner + DAMPING * np.eye(len(inner)))
    found = left @ gradient.numpy() @ right
    return (found, None) if module.bias is None else (found[:, :-1], found[:, -1])


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_preconditioned_by_covariances_of_all_ranks(size: int) -> None:
    """The first step of KFAC beside the definition, computed by one process from the samples of all ranks."""

    def rank(comm: Any) -> dict[str, Any]:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        kfcomm.torch.attach(made, optimizer, comm)
        kfac = kfcomm.torch.KFAC(made, optimizer, comm, damping=DAMPING, kl_clip=None)
        made(batch(comm.rank, 0)).square().mean().backward()
        kfac.step()
        return {name: one.grad.clone() for name, one in made.named_parameters()}

    ranks = each(rank, size)
    whole = model()
    sum(whole(batch(one, 0)).square().mean() for one in range(size)).div(size).backward()
    of = [covariances(whole, batch(one, 0)) for one in range(size)]
    for name, module in whole.named_modules():
        if name in of[0]:
            outer, inner = (sum(one[name][side] for one in of) / size for side in (0, 1))
            weight, bias = preconditioned(module, outer, inner)
            for found in ranks:
                assert found[f"{name}.weight"].flatten(1).numpy() == pytest.approx(weight, rel=1e-9, abs=1e-12)
                if bias is not None:
                    assert found[f"{name}.bias"].numpy() == pytest.approx(bias, rel=1e-9, abs=1e-12)
    for found in ranks:
        assert torch.equal(found["3.weight"], ranks[0]["3.weight"])
        assert found["3.weight"].numpy() == pytest.approx(whole[3].weight.grad.numpy())  # of no layer that K-FAC knows


def test_training_of_two_ranks_is_that_of_one_with_both_batches() -> None:
    def train(comm: Any, ranks: list[int]) -> Any:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        kfcomm.torch.attach(made, optimizer, comm)
        kfac = kfcomm.torch.KFAC(made, optimizer, comm, damping={"0": 0.1, "*": DAMPING}, covariances_every=2,
                                 inverses_every=4)  # fmt: skip
        for step in range(6):
            optimizer.zero_grad()
            sum(made(batch(rank, step)).square().mean() for rank in ranks).div(len(ranks)).backward()
            kfac.step()
            optimizer.step()
        return nn.utils.parameters_to_vector(made.parameters()).detach(), kfac.state_dict()

    two = each(lambda comm: train(comm, [comm.rank]), 2)
    assert torch.equal(two[0][0], two[1][0])
    for name, one in two[0][1]["inverses"].items():
        assert np.array_equal(one, two[1][1]["inverses"][name])
    assert two[0][1]["num_steps"] == 6


def test_k_fac_converges_in_fewer_steps_than_sgd() -> None:
    """A badly scaled least-squares problem, which is what K-FAC is for."""
    scales = torch.logspace(-1.5, 0.5, 16, dtype=torch.float64)

    def rank(comm: Any, *, with_kfac: bool) -> float:
        layer = filled(nn.Linear(16, 4, bias=False).double(), 0, 0.4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        kfcomm.torch.attach(layer, optimizer, comm, name="plain")
        kfac = kfcomm.torch.KFAC(layer, optimizer, comm, damping=1e-3, covariances_every=1, inverses_every=5,
                                 kl_clip=0.05) if with_kfac else None  # fmt: skip
        for step in range(60):
            x = batch(comm.rank, step, 64).flatten(1)[:, :16] * scales
            optimizer.zero_grad()
            loss = (layer(x) - x[:, :4] / scales[:4]).square().mean()
            loss.backward()
            if kfac is not None:
                kfac.step()
            optimizer.step()
        return float(loss.detach())

    plain = each(lambda comm: rank(comm, with_kfac=False))[0]
    assert each(lambda comm: rank(comm, with_kfac=True))[0] < 0.2 * plain


def test_a_copied_state_continues_alike() -> None:
    def rank(comm: Any, state: Any) -> Any:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        kfac = kfcomm.torch.KFAC(made, optimizer, comm, damping=DAMPING, covariances_every=1, inverses_every=3)
        for step in range(4):
            if state is not None and step == 2:
                kfac.detach()
                kfac = kfcomm.torch.KFAC(made, optimizer, comm, damping=DAMPING, covariances_every=1, inverses_every=3)
                kfac.load_state_dict(state[0])
            optimizer.zero_grad()
            made(batch(0, step)).square().mean().backward()
            kfac.step()
            optimizer.step()
            if step == 1:
                kept = kfac.state_dict()
                kept = {**kept, "sums": dict(kept["sums"]), "inverses": dict(kept["inverses"])}
        return kept, nn.utils.parameters_to_vector(made.parameters()).detach()

    first = each(lambda comm: rank(comm, None), 1)[0]
    again = each(lambda comm: rank(comm, (first[0],)), 1)[0]
    assert torch.equal(first[1], again[1])


def test_model_without_layers_for_kfac_is_refused() -> None:
    def rank(comm: Any) -> None:
        tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        tied[1].weight = tied[0].weight
        for bad in (nn.Sequential(nn.BatchNorm1d(3)), nn.Conv2d(4, 4, 3, groups=2), tied):
            optimizer = torch.optim.SGD(bad.parameters(), lr=0.1)
            with pytest.raises(ConfigError, match=r"has no torch\.nn\.Linear or Conv2d"):
                kfcomm.torch.KFAC(bad, optimizer, comm)
        good = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match=r"needs a communicator of kfcomm\.sync, not a NoneType"):
            kfcomm.torch.KFAC(good, torch.optim.SGD(good.parameters(), lr=0.1), None)

    each(rank, 1)
