"""Horovod's calls give what Horovod's documentation says, on a world of one, before ``init``, and in elastic jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfcomm.errors import ConfigError, PeerLost

torch = pytest.importorskip("torch")

from tests.frameworks import horovod_elastic  # noqa: E402  after the check for torch


@pytest.fixture
def hvd() -> Iterator[Any]:
    from kfcomm.horovod import torch as found

    yield found
    found.shutdown()


def test_calls_before_init_are_refused(hvd: Any) -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ConfigError, match=r"call hvd.init\(\) first"):
        hvd.rank()


def test_calls_in_a_world_of_one(hvd: Any) -> None:
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    x = torch.arange(3.0)
    for found in (
        hvd.allreduce(x, name="x"), hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), hvd.allgather(x),
        hvd.broadcast(x, 0), hvd.synchronize(hvd.allreduce_async(x)),
    ):  # fmt: skip
        assert found is not x
        torch.testing.assert_close(found, x)
    for found in (hvd.allreduce_(x), hvd.broadcast_(x, 0)):
        assert found is x
    assert hvd.allreduce(x, False).tolist() == x.tolist()
    with pytest.raises(ConfigError, match="expected average or op, got average=False and op="):
        hvd.allreduce(x, average=False, op=hvd.Max)
    handle = hvd.allreduce_async(x, op=hvd.Max)
    assert hvd.synchronize(handle).tolist() == x.tolist()
    assert hvd.poll(handle)
    assert hvd.broadcast_object({"epoch": 3}) == {"epoch": 3}
    assert hvd.allgather_object(7) == [7]
    hvd.barrier()


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_an_optimizer_steps_as_its_own_class(hvd: Any, op: str) -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=getattr(hvd, op))
    assert wrapped is optimizer
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    wrapped.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_an_optimizer_takes_all_arguments_of_the_examples(hvd: Any) -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16, backward_passes_per_step=2, op=hvd.Average, gradient_predivide_factor=1.0,
    )  # fmt: skip
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.5)
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.5)
    assert hvd.nccl_built() in (False, True)


def test_a_compression_needs_averages(hvd: Any) -> None:
    hvd.init()
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="wire_dtype='float16' goes with op='avg'"):
        hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16, op=hvd.Adasum)


# ---------------------------------------------------------------- elastic: in one process


def test_a_sampler_leaves_out_used_samples(hvd: Any) -> None:
    with pytest.raises(ConfigError, match=r"call hvd.init\(\) first"):
        hvd.elastic.ElasticSampler(range(10))
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(10), seed=3)
    order = list(sampler)
    assert sorted(order) == list(range(10))
    assert list(hvd.elastic.ElasticSampler(range(10), shuffle=False)) == list(range(10))
    sampler.record_batch(0, 4)
    again = hvd.elastic.ElasticSampler(range(10), seed=3)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == order[4:]
    assert len(again) == 6
    again.set_epoch(1)
    assert sorted(again) == list(range(10))
    assert list(again) != order
    again.record_batch(0, 10)
    again.reset()
    assert list(again) == []


@pytest.mark.parametrize(("used", "shares"), [(0, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]), (9, [[9]] * 3)])
def test_all_ranks_get_as_many_samples(
    hvd: Any, monkeypatch: pytest.MonkeyPatch, used: int, shares: list[list[int]]
) -> None:
    found = []
    monkeypatch.setattr(hvd.elastic, "size", lambda: 3)
    for number in range(3):
        monkeypatch.setattr(hvd.elastic, "rank", lambda number=number: number)
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": used})
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    assert found == shares


def test_a_state_returns_to_what_was_saved(hvd: Any) -> None:
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, seen=[])
    assert (state.model, state.optimizer) == (model, optimizer)

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.epoch += 1
        state.seen.append(state.epoch)
        return model.weight.detach().clone()

    step()
    state.commit()
    wanted = step()
    step()
    state.note = "not shared"
    state.restore()
    assert (state.epoch, state.seen, state.note) == (1, [1], "not shared")
    torch.testing.assert_close(step(), wanted, rtol=0, atol=0)


def test_a_state_refuses_what_cannot_be_sent(hvd: Any) -> None:
    hvd.init()
    with pytest.raises(ConfigError, match="seen"):
        hvd.elastic.TorchState(seen={1, 2})
    state = hvd.elastic.TorchState(epoch=0)
    with pytest.raises(ConfigError, match="epoch"):
        state.epoch = object()


def test_a_function_runs_once_where_nothing_changes(hvd: Any) -> None:
    hvd.init()
    calls: list[Any] = []

    @hvd.elastic.run
    def train(state: Any, more: int, *, other: int) -> int:
        """Train."""
        for state.epoch in range(state.epoch, 3):  # noqa: B020  as Horovod's examples have it
            calls.append(state.epoch)
            state.commit()
            state.check_host_updates()
        return more + other

    state = hvd.elastic.TorchState(epoch=0)
    state.register_reset_callbacks([lambda: calls.append("reset")])
    assert train(state, 1, other=2) == 3
    assert calls == [0, 1, 2]
    assert (train.__name__, train.__doc__) == ("train", "Train.")


def test_a_loss_is_an_error_where_ranks_cannot_change(hvd: Any) -> None:
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise PeerLost("rank 1 is lost", rank=1)

    with pytest.raises(PeerLost):
        train(hvd.elastic.TorchState())


# ---------------------------------------------------------------- elastic: jobs


def test_a_killed_rank_takes_the_others_back_to_their_last_commit(tmp_path: Path) -> None:
    reports, output = horovod_elastic.run(
        tmp_path, {"seed": 1, "kills": {"1": 14}}, "-n", "3", "--elastic", "2:3", "--restart-limit", "0"
    )
    assert sorted(reports) == [0, 2], output
    horovod_elastic.check(reports)
    for one in reports.values():
        assert one["births"] == [0, 2]
        assert one["begun"] == [[0, 0, [0, 1, 2]], [1, 12, [0, 2]]]
        assert [len(samples) for _, _, samples in one["log"][:14]] == [3] * 12 + [2] * 2


@pytest.mark.slow
def test_ranks_join_and_leave_between_commits(tmp_path: Path) -> None:
    plan = {"seed": 2, "sizes": {"5": 3, "21": 2}, "waits": True}
    reports, output = horovod_elastic.run(tmp_path, plan, "-n", "2", "--elastic", "2:3")
    assert sorted(reports) == [0, 1], output
    horovod_elastic.check(reports)
    log = reports[0]["log"]
    assert [len(samples) for _, _, samples in log] == [2] * 5 + [3] * 16 + [2] * (len(log) - 21)
    # in proportion to the number of ranks, by the callback; the scheduler goes on
    for number, (_, rate, samples) in enumerate(log):
        assert rate == pytest.approx(horovod_elastic.RATE * len(samples) / 2 * 0.9 ** (number // 20))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_jobs_with_kills_at_random_moments(seed: int) -> None:
    horovod_elastic.search(range(seed, seed + 1))
