"""A training in one object: as its parts by hand, in both interfaces, while ranks die, join and take bad steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Context, GuardSteps, Policy
from kfcomm.elastic import ElasticSampler
from kfcomm.elastic.sampler import share
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import Algorithm, Training
from kfcomm.train.policies import SwitchAgreement
from tests.elastic.support import Died

SAMPLES, BATCH = 120, 12
RATE = 0.05
RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((SAMPLES, 3))
OUTPUTS = INPUTS @ [1.0, -2.0, 3.0] + 0.1 * RNG.standard_normal(SAMPLES)

ALGORITHMS = {
    "ssgd": Algorithm("ssgd"), "adasum": Algorithm("adasum"), "sma": Algorithm("sma", alpha=0.2),
    "ea-sgd": Algorithm("ea-sgd", alpha=0.2, every=2), "local-sgd": Algorithm("local-sgd", every=3),
    "diloco": Algorithm("diloco", every=3), "local-adaalter": Algorithm("local-adaalter", every=3),
    "adasgd": Algorithm("adasgd", after=4),
}  # fmt: skip


def start() -> dict[str, Any]:
    return {"w": np.zeros(3), "b": [np.zeros(())]}


def gradients_of(model: Any, indices: Any) -> tuple[float, Any]:
    x, y = INPUTS[indices], OUTPUTS[indices]
    error = x @ model["w"] + model["b"][0] - y
    count = max(1, len(indices))
    return float(error @ error) / count, {"w": 2 * x.T @ error / count, "b": [np.asarray(2 * error.sum() / count)]}


def applied(model: Any, gradients: Any, rate: float = RATE) -> Any:
    return {"w": model["w"] - rate * gradients["w"], "b": [model["b"][0] - rate * gradients["b"][0]]}


def sampler(batch: int = BATCH) -> ElasticSampler:
    return ElasticSampler(SAMPLES, batch=batch)


def numbers(model: Any) -> list[float]:
    return [*model["w"].tolist(), float(model["b"][0])]


def trained(training: Training, passes: int, **options: Any) -> list[float]:
    for step in training.steps(sampler(), passes=passes, **options):
        loss, gradients = gradients_of(training.model, step.indices)
        training.update(gradients, applied, loss=loss)
    return numbers(training.model)


# ---------------------------------------------------------------- its parts by hand


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_training_is_the_loop_by_hand(kind: str) -> None:
    def by_hand(comm: Any) -> list[float]:
        model, order = start(), sampler()
        way = ALGORITHMS[kind].made(comm, model)
        while len(batch := order.take_until(2)):
            _, gradients = gradients_of(model, share(batch, comm.rank, comm.size))
            pending = way.parameters(model)
            gradients = way.gradients(gradients).wait()
            model = applied(pending.wait(), gradients)
        return numbers(model)

    def by_training(comm: Any, policies: Any) -> list[float]:
        return trained(Training(comm, start(), algorithm=ALGORITHMS[kind], policies=policies), 2)

    found = []
    for program in (by_hand, lambda comm: by_training(comm, []), lambda comm: by_training(comm, [GuardSteps()])):
        with sync_world(3) as comms:
            found.append(run_threads(comms, program))
    assert found[0] == found[1]
    # The numbers of the guard travel with gradients, whose order of adding up may change with their place.
    assert found[0] == [pytest.approx(one, rel=1e-12) for one in found[2]]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["ssgd", "sma", "diloco"])
@pytest.mark.parametrize("is_elastic", [False, True])
async def test_asyncio_gives_the_same(kind: str, is_elastic: bool) -> None:
    async def main(comm: Any) -> list[float]:
        training = Training(comm, start(), algorithm=ALGORITHMS[kind], policies=[GuardSteps()])
        async for step in training.steps(sampler(), passes=2):
            loss, gradients = gradients_of(training.model, step.indices)
            await training.update(gradients, applied, loss=loss)
        return numbers(training.model)

    async with world(2, elastic=is_elastic) as comms:
        found = await run_ranks(list(comms), main)
    with sync_world(2, elastic=is_elastic) as comms:
        program = lambda comm: trained(Training(comm, start(), algorithm=ALGORITHMS[kind], policies=[GuardSteps()]), 2)  # noqa: E731
        assert run_threads(list(comms), program) == found


def test_arrays_updated_in_place() -> None:
    def main(comm: Any) -> bool:
        training = Training(comm, {"w": np.zeros(3)}, algorithm=Algorithm("sma", alpha=1.0))

        def apply(model: Any, gradients: Any) -> None:
            model["w"] -= RATE * gradients["w"]

        for step in training.steps(sampler(), passes=5):
            loss, gradients = gradients_of({**training.model, "b": [np.zeros(())]}, step.indices)
            training.update({"w": gradients["w"]}, apply, loss=loss)
        return bool(np.abs(training.model["w"] - [1, -2, 3]).max() < 1)

    with sync_world(2) as comms:
        assert run_threads(comms, main) == [True, True]


# ---------------------------------------------------------------- policies


class Halve(Policy):
    """Doubles the batch and halves the rate after some steps."""

    def after_step(self, ctx: Context) -> None:
        if ctx.step == 4:
            ctx.set_batch_size(2 * BATCH)
            ctx.set_learning_rate(RATE / 2)


def test_batch_and_rate_follow_the_policies() -> None:
    def main(comm: Any) -> list[tuple[int, float]]:
        training = Training(comm, start(), policies=[Halve()], learning_rate=RATE)
        assert training.learning_rate == RATE
        found = []
        for step in training.steps(sampler(), passes=2):
            _, gradients = gradients_of(training.model, step.indices)
            training.update(gradients, applied)
            found.append((len(step.batch), training.learning_rate))
        return found

    for is_elastic in (False, True):
        with sync_world(2, elastic=is_elastic) as comms:
            one, other = run_threads(list(comms), main)
        assert one == other
        assert one[:6] == [(BATCH, RATE)] * 6
        assert set(one[6:]) <= {(2 * BATCH, RATE / 2), (BATCH, RATE / 2)}  # the rest of a pass may be smaller
        assert (2 * BATCH, RATE / 2) in one


class StopLater(Policy):
    """Ends the training after some steps."""

    def after_step(self, ctx: Context) -> None:
        if ctx.step == 3:
            ctx.stop("enough")


@pytest.mark.parametrize("is_elastic", [False, True])
def test_policy_ends_the_training(is_elastic: bool) -> None:
    def main(comm: Any) -> int:
        training, count = Training(comm, start(), policies=[StopLater()]), 0
        for step in training.steps(sampler(), passes=4):
            _, gradients = gradients_of(training.model, step.indices)
            training.update(gradients, applied)
            count += 1
        return count

    with sync_world(2, elastic=is_elastic) as comms:
        assert run_threads(list(comms), main) == [5, 5]


def test_policies_switch_between_algorithms() -> None:
    def main(comm: Any) -> tuple[list[float], list[str]]:
        training = Training(
            comm, start(), algorithm=[Algorithm("sma", alpha=0.1), "ssgd"], policies=[SwitchAgreement(at_step=5)]
        )
        said = []
        for step in training.steps(sampler(), passes=2):
            _, gradients = gradients_of(training.model, step.indices)
            training.update(gradients, applied)
            said.append(type(training.way).__name__)
        return numbers(training.model), said

    with sync_world(3) as comms:
        found = run_threads(comms, main)
    models, said = zip(*found, strict=True)
    assert models[0] == models[1] == models[2]
    assert said[0] == ["SMA"] * 7 + ["SynchronousSGD"] * 13


def test_monitor_measures_the_batches_of_the_steps() -> None:
    def main(comm: Any) -> tuple[float, Any]:
        training = Training(comm, start(), monitor={"every": 1}, policies=[])
        for step in training.steps(sampler(), passes=20):
            _, gradients = gradients_of(training.model, step.indices)
            training.update(gradients, lambda model, _: model)
        return training.monitor.values["noise_scale"], training.monitor.values["big_batch"]

    # By the definition, at the first model: the trace of the covariance over the squared norm of the mean.
    each = np.array([[*one["w"], one["b"][0]] for _, one in (gradients_of(start(), [i]) for i in range(SAMPLES))])
    truth = each.var(axis=0).sum() / (each.mean(axis=0) ** 2).sum()
    with sync_world(3) as comms:
        for scale, batch in run_threads(comms, main):
            assert batch == pytest.approx(BATCH)
            assert scale == pytest.approx(truth, rel=0.35)


# ---------------------------------------------------------------- bad steps


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("is_elastic", [False, True])
def test_void_steps_change_nothing_and_give_samples_back(kind: str, is_elastic: bool) -> None:
    """Beside the same training in which these steps do not occur: the same models, and each sample used once a pass."""

    def main(comm: Any, bad: Any) -> tuple[list[float], list[int], list[int]]:
        training = Training(comm, start(), algorithm=ALGORITHMS[kind], policies=[GuardSteps()])
        order, voids, used = sampler(), [], []
        for number, step in enumerate(training.steps(order, passes=2)):
            before = training.model
            _, gradients = gradients_of(before, step.indices)
            if number in bad and comm.rank == 1:
                gradients["w"][number % 3] = (np.nan, np.inf, -np.inf)[number % 3]
            training.update(gradients, applied)
            if training.is_void:
                voids.append(number)
                assert training.model is before or numbers(training.model) == numbers(before)
            else:
                used.extend(step.batch.tolist())
        return numbers(training.model), voids, used

    with sync_world(2, elastic=is_elastic) as comms:
        found = run_threads(list(comms), lambda comm: main(comm, (0, 7, 8, 15)))
    for model, voids, used in found:
        assert voids == [0, 7, 8, 15]
        assert np.isfinite(model).all()
        assert sorted(used) == sorted([*range(SAMPLES)] * 2)
    if ALGORITHMS[kind].keeps_replicas:
        return
    assert found[0][0] == found[1][0]


# ---------------------------------------------------------------- ranks that change


@pytest.mark.parametrize("kind", ["ssgd", "sma", "diloco"])
def test_a_rank_dies_and_another_joins(kind: str) -> None:
    with sync_world(3, elastic=True) as comms:
        joined: list[Any] = []
        threads: list[threading.Thread] = []

        def main(comm: Any, birth: int) -> Any:
            training = Training(
                comm, start(), algorithm=ALGORITHMS[kind], policies=[GuardSteps()], state={"used": np.zeros(SAMPLES)}
            )
            for step in training.steps(sampler(), passes=3, on_loss="finish"):
                if birth == 1 and step.number == 3:
                    comms.kill(1)
                    raise Died
                if birth == 0 and step.number == 5:
                    threads.append(threading.Thread(target=lambda: joined.append(main(comms.join(3), 3))))
                    threads[0].start()
                _, gradients = gradients_of(training.model, step.indices)
                training.update(gradients, applied)
            return numbers(training.model), training.way.num_steps

        def rank(comm: Any) -> Any:
            try:
                return main(comm, comm.births[comm.rank])
            except Died:
                return None

        found = [one for one in run_threads(list(comms), rank) if one is not None]
        for thread in threads:
            thread.join()
        found += joined
    assert len(found) == 3
    assert len({steps for _, steps in found}) == 1
    if kind == "ssgd":
        assert found[0][0] == found[1][0] == found[2][0]
    else:
        assert np.allclose([one for one, _ in found], found[0][0], atol=0.5)


def test_a_checkpoint_resumes_the_training(tmp_path: Any) -> None:
    def part(comm: Any, passes: int) -> Any:
        training = Training(comm, start(), algorithm=ALGORITHMS["diloco"])
        path = tmp_path / "training.npz"
        return trained(training, passes, checkpoint=path, checkpoint_every=1), training.way.num_steps

    with sync_world(2, elastic=True) as comms:
        run_threads(list(comms), lambda comm: part(comm, 1))
    with sync_world(1, elastic=True) as comms:
        found, steps = run_threads(list(comms), lambda comm: part(comm, 2))[0]
    assert 15 <= steps <= 20
    assert np.abs(np.array(found[:3]) - [1, -2, 3]).max() < 1.5


# ---------------------------------------------------------------- bad input


def test_bad_arguments() -> None:
    def main(comm: Any) -> None:
        wrong: list[tuple[Callable[[], Any], str]] = [
            (lambda: Training(comm, start(), algorithm="sdg"), "algorithm 'sdg' is not known"),
            (lambda: Training(comm, start(), algorithm=[]), "there is at least one"),
            (lambda: Training(comm, start(), algorithm=["sma", "sma"]), "different names"),
            (lambda: Training(comm, start(), learning_rate=-1), "learning rate"),
            (lambda: Training(comm, start(), algorithm="sma", monitor=True), "monitor"),
            (lambda: Training(comm, start()).update(start(), applied), "exchanged in a step"),
            (lambda: Training(comm, start()).observe(loss=1), "known from its first step on"),
            (lambda: Training(comm, start()).steps(sampler(), checkpoint="x"), r"for a communicator of init\(elastic"),
        ]
        for make, said in wrong:
            with pytest.raises(ConfigError, match=said):
                make()

    with sync_world(1) as comms:
        run_threads(comms, main)


@pytest.mark.asyncio
async def test_the_other_interface_is_refused() -> None:
    async with world(1) as comms:
        with pytest.raises(ConfigError, match="write async for"):
            list(Training(comms[0], start()).steps(sampler()))


def test_ranks_with_different_algorithms_are_told() -> None:
    def main(comm: Any) -> None:
        training = Training(comm, start(), algorithm="ssgd" if comm.rank else "sma")
        with pytest.raises((CollectiveMismatch, ConfigError), match=r"SMA|SynchronousSGD"):
            trained(training, 1)

    with sync_world(2) as comms:
        run_threads(comms, main)
