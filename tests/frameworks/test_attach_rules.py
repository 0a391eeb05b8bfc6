"""With a model attached a program gives what one process gives, or an error on every rank."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import kfcomm.sync
import kfcomm.torch
from kfcomm import testing
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError, KfcommError
from tests.frameworks.ranks import each, filled
from tests.sync.worlds import joined

torch = pytest.importorskip("torch")

nn = torch.nn

WIDTH = 4
DEFER = pytest.mark.parametrize("defer", [False, True], ids=["at once", "deferred"])


def made(seed: int = 0) -> Any:
    return filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double(), seed)


def loss(model: Any, rank: int, step: int = 0) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return (model(x) - x).square().mean()


def attached(comm: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = made(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, kfcomm.torch.attach(model, optimizer, comm, bucket_nbytes=40, **options)


def numbers(model: Any) -> Any:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def one_process(step: Any, size: int = 2) -> Any:
    """Result of training on the mean of all ranks' losses, by ``step(model, optimizer, loss)``."""
    model = made()
    step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda number: sum(loss(model, rank, number) for rank in range(size)) / size,
    )
    return numbers(model)


# ---------------------------------------------------------------- gradients


@DEFER
def test_a_second_pass_adds_to_the_average(defer: bool) -> None:
    def rank(comm: Any) -> Any:
        model, _, _ = attached(comm, defer=defer)
        loss(model, comm.rank, 1).backward()
        loss(model, comm.rank, 2).backward()
        return [one.grad.clone() for one in model.parameters()]

    first, second = each(rank)
    model = made()
    (sum(loss(model, rank, step) for rank in range(2) for step in (1, 2)) / 2).backward()
    for one, other, parameter in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, parameter.grad)


def test_step_refuses_gradients_from_no_sync_alone() -> None:
    def rank(comm: Any) -> None:
        model, optimizer, held = attached(comm)
        with held.no_sync():
            loss(model, comm.rank).backward()
        with pytest.raises(ConfigError, match=r"2.bias was gathered in no_sync and not averaged.*attached.wait\(\)"):
            optimizer.step()
        held.wait()
        optimizer.step()
        assert comm.consensus(numbers(model))

    each(rank)


def test_step_refuses_assigned_gradients_that_were_not_averaged() -> None:
    def rank(comm: Any) -> None:
        model, optimizer, held = attached(comm)
        own = list(model.parameters())
        for one, gradient in zip(own, torch.autograd.grad(loss(model, comm.rank), own), strict=True):
            one.grad = gradient
        with pytest.raises(
            ConfigError, match=r"a gradient of 2.bias into parameter.grad itself, which is not averaged"
        ):
            optimizer.step()
        held.wait()
        optimizer.step()
        assert comm.consensus(numbers(model))

    each(rank)


def test_a_rank_whose_passes_were_all_in_no_sync_takes_part_by_a_wait() -> None:
    def rank(comm: Any) -> Any:
        model, optimizer, held = attached(comm)
        if comm.rank == 0:
            loss(model, 0).backward()
        else:
            with held.no_sync():
                (0 * loss(model, 1)).backward()
            held.wait()
        optimizer.step()
        return numbers(model)

    first, second = each(rank)
    assert torch.equal(first, second)


@DEFER
def test_two_models_that_train_against_each_other(defer: bool) -> None:
    def train(maker: Any, judge: Any, attach: Any, rows: slice) -> Any:
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (maker, judge)]
        attach(maker, optimizers[0], "maker")
        attach(judge, optimizers[1], "judge")
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            real, noise = torch.randn(2, 6, WIDTH, generator=generator, dtype=torch.float64)
            made_up = maker(noise[rows])
            optimizers[1].zero_grad()
            (judge(made_up.detach()).mean() - judge(real[rows]).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judge(made_up).square().mean().backward()  # gives the judge gradients that nobody wants
            optimizers[0].step()
        return torch.cat([numbers(maker), numbers(judge)])

    def rank(comm: Any) -> Any:
        def attach(model: Any, optimizer: Any, name: str) -> None:
            kfcomm.torch.attach(model, optimizer, comm, name=name, defer=defer, bucket_nbytes=40)

        return train(made(comm.rank), made(10 + comm.rank), attach, slice(comm.rank, None, 2))

    first, second = each(rank)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, train(made(), made(10), lambda *_: None, slice(None)))


@DEFER
def test_two_optimizers_of_one_model(defer: bool) -> None:
    def split(model: Any) -> list[Any]:
        parts = ([one for one in model.parameters() if one.dim() == dim] for dim in (1, 2))
        return [torch.optim.SGD(part, lr=0.1 / number) for number, part in enumerate(parts, 1)]

    def train(model: Any, optimizers: list[Any], loss_of: Any) -> Any:
        for number in range(3):
            model.zero_grad()
            loss_of(number).backward()
            for one in optimizers:
                one.step()
        return numbers(model)

    def rank(comm: Any) -> Any:
        model = made(comm.rank)
        optimizers = split(model)
        for name, one in zip("ab", optimizers, strict=True):
            kfcomm.torch.attach(model, one, comm, name=name, defer=defer)
        return train(model, optimizers, lambda number: loss(model, comm.rank, number))

    first, second = each(rank)
    assert torch.equal(first, second)
    model = made()
    wanted = train(model, split(model), lambda number: sum(loss(model, rank, number) for rank in range(2)) / 2)
    torch.testing.assert_close(first, wanted)


# ---------------------------------------------------------------- what goes wrong on one rank


class Fails(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise MemoryError("no memory left")


@DEFER
@pytest.mark.parametrize("failing", [{1}, {0, 2}, {0, 1, 2}], ids=str)
def test_a_pass_that_raises_midway_is_an_error_on_all_ranks_and_the_next_is_right(
    failing: set[int], defer: bool
) -> None:
    def steps(model: Any, optimizer: Any, loss_of: Any) -> None:
        for number in (0, 2):
            optimizer.zero_grad()
            loss_of(number).backward()
            optimizer.step()

    def rank(comm: Any) -> Any:
        model, optimizer, held = attached(comm, defer=defer)
        errors = []
        for number in range(3):
            optimizer.zero_grad()
            try:
                if number == 1 and comm.rank in failing:
                    hidden = Fails.apply(model[0](torch.ones(1, WIDTH, dtype=torch.float64)))
                    model[2](hidden).sum().backward()
                else:
                    loss(model, comm.rank, number).backward()
                held.wait()
            except (MemoryError, CollectiveAborted) as error:
                errors.append(str(error))
                assert all(one.grad is None for one in model.parameters())
                continue
            optimizer.step()
        return numbers(model), errors

    found = each(rank, 3)
    for number, (one, errors) in enumerate(found):
        assert torch.equal(one, found[0][0])
        said = ", ".join(map(str, sorted(failing)))
        ranks = f"rank {said}" if len(failing) == 1 else f"ranks {said}"
        assert len(errors) == 1
        assert errors[0] == "no memory left" if number in failing else ranks + " has raised an error" in errors[0]
    torch.testing.assert_close(found[0][0], one_process(steps, 3))


def test_a_pass_that_raises_before_the_program_ends_does_not_hold_up_others() -> None:
    def rank(comm: Any) -> None:
        with comm:
            model, _, _ = attached(comm)
            if comm.rank == 0:
                hidden = Fails.apply(model[0](torch.ones(1, WIDTH, dtype=torch.float64)))
                with pytest.raises(MemoryError):
                    model[2](hidden).sum().backward()
                return
            with pytest.raises(CollectiveAborted, match="the backward pass of rank 0 has raised an error"):
                loss(model, 1).backward()

    each(rank)


def test_buffers_of_a_rank_whose_pass_has_raised_are_its_own_to_write() -> None:
    written = threading.Event()

    def rank(comm: Any) -> Any:
        model = made(comm.rank)
        model.register_buffer("mean", torch.zeros(3))
        held = kfcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
        if comm.rank == 1:
            hidden = Fails.apply(model[0](torch.ones(1, WIDTH, dtype=torch.float64)))
            with pytest.raises(MemoryError):
                model[2](hidden).sum().backward()
            model.mean.fill_(5)
            written.set()
        else:
            written.wait()
            with pytest.raises(CollectiveAborted):
                loss(model, 0).backward()
            model.mean.fill_(5)
        held.wait()
        comm.barrier()
        return model.mean.tolist()

    assert each(rank) == [[5.0] * 3] * 2


@pytest.mark.parametrize("what", ["a step", "a rate"])
def test_different_step_counts_raise_mismatch_on_all_ranks(what: str) -> None:
    def rank(comm: Any) -> str:
        model, optimizer, _ = attached(comm)
        for number in range(2):
            optimizer.zero_grad()
            loss(model, comm.rank, number).backward()
            if what == "a step" and (comm.rank, number) == (1, 1):
                continue
            if what == "a rate" and comm.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.05
            optimizer.step()
            if what == "a rate":
                break
        with pytest.raises(CollectiveMismatch) as caught:
            loss(model, comm.rank, 2).backward()
        return str(caught.value)

    said = each(rank, 3)
    assert len(set(said)) == 1
    for part in ("rank 0: 2 steps", "rank 1: 1 steps") if what == "a step" else ("rank 0: 1 steps", "lr=0.05"):
        assert part in said[0]


def test_a_parameter_inside_and_outside_of_a_reentrant_checkpoint_is_right_or_an_error() -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(model: Any, x: Any) -> Any:
        return model[0](checkpoint(model[0], x.requires_grad_(), use_reentrant=True, preserve_rng_state=False))

    def rank(comm: Any) -> Any:
        model, _, _ = attached(comm)
        errors = []
        for _ in range(2):
            model.zero_grad()
            try:
                loss(lambda x: forward(model, x), comm.rank).backward()
            except KfcommError as error:
                errors.append(str(error))
            else:
                assert comm.consensus(model[0].weight.grad)
        return errors, model[0].weight.grad

    found = each(rank)
    assert all("use_reentrant=False" in errors[0] and len(errors) == 1 for errors, _ in found)
    model = made()
    (sum(loss(lambda x: forward(model, x), rank) for rank in range(2)) / 2).backward()
    torch.testing.assert_close(found[0][1], model[0].weight.grad)


# ---------------------------------------------------------------- parameters and the optimizer


def test_a_write_that_deferred_updates_cannot_see_is_an_error() -> None:
    def rank(comm: Any) -> None:
        model, optimizer, _ = attached(comm, defer=True)
        alias = model[0].weight.detach()  # shares its version, too
        loss(model, comm.rank).backward()
        optimizer.step()
        alias.zero_()
        with pytest.raises(ConfigError, match=r"0.weight was written to after optimizer.step\(\).*attached.wait\(\)"):
            model(torch.ones(1, WIDTH, dtype=torch.float64))

    each(rank)


@DEFER
def test_hooks_of_the_program_see_updated_parameters_and_averages(defer: bool) -> None:
    def rank(comm: Any) -> Any:
        model = made(comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: seen.append(numbers(model)))
        kfcomm.torch.attach(model, optimizer, comm, defer=defer)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
        optimizer.register_step_post_hook(lambda *_: seen.append(numbers(model)))
        loss(model, comm.rank).backward()
        optimizer.step()
        return seen

    first, second = each(rank)
    model = made()
    (sum(loss(model, rank) for rank in range(2)) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for one in (*first, *second):
        torch.testing.assert_close(one, numbers(model))


# ---------------------------------------------------------------- copies, and the end


@DEFER
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_close_waits_for_deferred_updates(transport: str, defer: bool) -> None:
    leaving = threading.Event()

    def rank(comm: Any) -> Any:
        with comm:
            model, optimizer, held = attached(comm, defer=defer)
            if comm.rank == 0 and defer:
                leaving.wait()
            loss(model, comm.rank).backward()
            optimizer.step()
            leaving.set()
        found = model.state_dict()
        held.detach()  # lets go of the memory
        return found

    with joined(transport) as comms:
        first, second = testing.run_threads(comms, rank)
    assert all(torch.equal(one, second[name]) for name, one in first.items())
    model = made()
    (sum(loss(model, rank) for rank in range(2)) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(first["0.weight"], model[0].weight.detach())


def test_failed_deferred_work_does_not_keep_a_communicator_open() -> None:
    with testing.sync_world(2) as comms:

        def rank(comm: Any) -> None:
            model, optimizer, _ = attached(comm, defer=True)
            if comm.rank == 0:
                ready.wait()
                comms.kill(0)
                return
            loss(model, comm.rank).backward()
            optimizer.step()
            ready.wait()
            with pytest.raises(KfcommError, match="rank 0"):
                comm.close()
            with pytest.raises(KfcommError, match="closed"):
                comm.barrier()

        ready = threading.Barrier(2)
        testing.run_threads(comms, rank)


# ---------------------------------------------------------------- attaching


class Buffered(nn.Module):
    """A layer, and buffers of all kinds."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("hidden", torch.full((2,), value), persistent=False)
        self.register_buffer("small", torch.full((3,), value).to(torch.float8_e4m3fn))
        self.register_buffer("turned", torch.full((2, 3), value).T)
        self.register_buffer("none", None)

    def forward(self, x: Any) -> Any:
        return self.norm(self.layer(x)) + self.hidden


def buffers(model: Any) -> list[Any]:
    return [one.float().clone() for one in model.buffers()]


@DEFER
def test_all_buffers_become_those_of_rank_0_and_stay_so(defer: bool) -> None:
    def rank(comm: Any) -> Any:
        model = Buffered(1.0 + comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kfcomm.torch.attach(model, optimizer, comm, defer=defer)
        found = [buffers(model)]
        x = torch.arange(8.0).reshape(4, 2) * (1 + comm.rank)
        model(x).square().mean().backward()
        found.append(buffers(model))
        return found

    first, second = each(rank)
    for one, other in zip(first, second, strict=True):
        assert len(one) == 6
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert all((one == 1).all() for one in first[0][:3])
    assert first[1][5] == 1  # num_batches_tracked
    assert not torch.equal(first[0][3], first[1][3])


def differing(kind: str, rank: int) -> tuple[Any, Any, dict[str, Any]]:
    """Arguments of ``attach`` by rank: rank 1 differs."""
    options: dict[str, Any] = {}
    model = made()
    if rank == 1:
        match kind:
            case "meta":
                model = model.to("meta")
            case "shape":
                model[2] = nn.Linear(WIDTH, 2).double()
            case "dtype":
                model[2].float()
            case "buffer":
                model.register_buffer("other", torch.ones(2))
            case "option":
                options["bucket_nbytes"] = 7
            case "compression":
                options["compression"] = "zip"
    kinds = {"optimizer": torch.optim.Adam} if rank == 1 else {}
    rate = 0.2 if (kind, rank) == ("rate", 1) else 0.1
    optimizer = kinds.get(kind, torch.optim.SGD)(model.parameters(), lr=rate)
    if (kind, rank) == ("state", 1):
        model[0].weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
        optimizer.param_groups[0]["momentum"] = 0.5
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0
        optimizer.zero_grad()
    return model, optimizer, options


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "meta",
            "'grad' cannot work: rank 1: 0.weight is on device 'meta': attach is for models on the CPU and one CUDA",
        ),
        ("shape", r"2.weight is \(4, 4\) torch.float64 on rank 0, and \(2, 4\) torch.float64 on rank 1"),
        ("dtype", r"2.weight is \(4, 4\) torch.float64 on rank 0, and \(4, 4\) torch.float32 on rank 1"),
        ("buffer", r"other is not there on rank 0, and \(2,\) torch.float32 on rank 1"),
        ("option", "bucket_nbytes is None on rank 0, and 7 on rank 1"),
        ("compression", "rank 1: compression 'zip' is not known"),
        ("optimizer", "optimizer is SGD on rank 0, and Adam on rank 1"),
        ("rate", "group 0 of the optimizer is .*'0.1'.* on rank 0, and .*'0.2'.* on rank 1"),
        ("state", "state of 0.weight is not there on rank 0, and .*momentum_buffer.* on rank 1"),
    ],
)
def test_different_models_or_options_raise_on_all_ranks(kind: str, message: str) -> None:
    def rank(comm: Any) -> None:
        model, optimizer, options = differing(kind, comm.rank)
        with pytest.raises(ConfigError, match=message):
            kfcomm.torch.attach(model, optimizer, comm, **options)
        comm.barrier()

    each(rank, 3)


def test_gradients_of_a_type_that_cannot_be_averaged_are_refused() -> None:
    with kfcomm.sync.init() as comm:
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(model.weight.to(torch.float8_e4m3fn))
        with pytest.raises(ConfigError, match="the gradient of weight cannot be averaged: dtype float8_e4m3fn"):
            kfcomm.torch.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), comm)
