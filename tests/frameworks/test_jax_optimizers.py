"""JAX transformations give the results and errors of `kfcomm.train`, eager and compiled."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State
from kfcomm.errors import CollectiveMismatch, ConfigError
from tests.launch.launched import environ, finished

jax = pytest.importorskip("jax")
jnp = jax.numpy

from kfcomm.jax import optimizers  # noqa: E402  it imports JAX
from tests.frameworks import jax_programs  # noqa: E402

NAMES = ("agreements", "adaalter", "changed", "pairs")


@pytest.mark.parametrize("name", NAMES)
def test_eager(name: str) -> None:
    with testing.sync_world(3) as comms:
        testing.run_threads(comms, lambda comm: jax_programs.PROGRAMS[name](comm, lambda call: call))


def test_compiled() -> None:
    """In processes: ranks that are threads cannot have compiled collectives."""
    program = (sys.executable, "-m", "tests.frameworks.jax_programs", *NAMES)
    done = finished("run", "-n", "2", *program, env=environ(JAX_PLATFORMS="cpu"))
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {name}" for rank in range(2) for name in NAMES)


def test_the_center_and_the_outer_model_are_in_the_state() -> None:
    def main(comm: Any) -> None:
        elastic = jax_programs.chained(jax_programs.SGD, optimizers.elastic_averaging(comm, 0.5))
        _, (_, state) = jax_programs.trained(comm, lambda call: call, elastic, 1)
        assert state.center["w"].tolist() == [[1.0, 1.0]] * 3
        assert int(state.count) == 1
        outer = jax_programs.chained(jax_programs.SGD, optimizers.diloco(comm, every=1, name="outer"))
        _, (_, state) = jax_programs.trained(comm, lambda call: call, outer, 1)
        assert state.velocity["w"].tolist() == [[0.0, 0.0]] * 3
        assert state.model["w"].tolist() == [[1.0, 1.0]] * 3

    with testing.sync_world(2) as comms:
        testing.run_threads(comms, main)


def refused(make: Callable[[Any], Any], error: type[Exception], says: str, params: Any = None) -> list[str]:
    def main(comm: Any) -> str:
        with pytest.raises(error, match=says) as caught:
            make(comm).init({"x": jnp.ones(2)} if params is None else params(comm))
        comm.barrier()  # it stays usable
        return str(caught.value)

    with testing.sync_world(2) as comms:
        return testing.run_threads(comms, main)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda comm, bad: optimizers.sma(comm, 2.0 if bad else 0.1), "alpha is above 0 and at most 1, not 2.0"),
        (lambda comm, bad: optimizers.synchronous_sgd(comm, op="max" if bad else "avg"), "op is 'avg' or 'adasum'"),
        (lambda comm, bad: optimizers.elastic_averaging(comm, 0.6 if bad else 0.5), "at most 0.5, not 0.6"),
        (lambda comm, bad: optimizers.elastic_averaging(comm, 0.5, every=0 if bad else 1), "every is a whole number"),
        (lambda comm, bad: optimizers.local_sgd(comm, 0 if bad else 1), "every is a whole number"),
        (lambda comm, bad: optimizers.diloco(comm, lr=0.0 if bad else 1.0), "lr is above 0"),
        (lambda comm, bad: optimizers.diloco(comm, momentum=1.0 if bad else 0.9), "momentum is at least 0 and below 1"),
        (lambda comm, bad: optimizers.adasgd(comm, jax_programs.SGD, after=0 if bad else 2), "after is a whole"),
        (lambda comm, bad: optimizers.pair_averaging(comm, weights=[0.0] if bad else None), "2 ranks have 2 weights"),
        (lambda comm, bad: optimizers.pair_averaging(comm, max_staleness=0 if bad else 9), "max_staleness is above 0"),
        (
            lambda comm, bad: optimizers.local_adaalter(comm, jax_programs.SGD, 2, epsilon=0.0 if bad else 1.0),
            "epsilon is above 0",
        ),
        (
            lambda comm, bad: optimizers.local_adaalter(comm, jax_programs.SGD, 2, initial=-1.0 if bad else 1.0),
            "initial is at least 0",
        ),
    ],
)
def test_a_number_out_of_range_on_one_rank_is_an_error_on_all(make: Callable[[Any, bool], Any], says: str) -> None:
    other, bad = refused(lambda comm: make(comm, comm.rank == 1), ConfigError, says)
    assert other.startswith(f"rank 1 has {bad}; rank 0 has ")


def test_ranks_that_agree_in_different_ways_see_both_sides() -> None:
    first, second = refused(
        lambda comm: optimizers.sma(comm) if comm.rank else optimizers.local_sgd(comm, 4),
        CollectiveMismatch,
        r"rank 0 has local_sgd\(every=4\); rank 1 has sma\(alpha=0.1\)",
    )
    assert first == second


def test_params_that_differ_are_an_error_on_all() -> None:
    refused(
        optimizers.sma, ConfigError, "these differ: kfcomm.jax.broadcast", lambda comm: {"x": jnp.ones(2) + comm.rank}
    )


def test_errors_of_one_rank() -> None:
    with testing.sync_world(1) as (comm,):
        with pytest.raises(ConfigError, match=r"kfcomm.sync, not a Communicator"):
            optimizers.sma(comm._inner)
        way = optimizers.sma(comm)
        state = way.init(jnp.ones(2))
        with pytest.raises(ConfigError, match=r"sma\(alpha=0.1\) agrees on models: .* needs params"):
            way.update(jnp.ones(2), state)
        updates, _ = jax.jit(way.update)(jnp.ones(2), jax.jit(way.init)(jnp.ones(2)), jnp.ones(2))
        assert updates.tolist() == [1.0, 1.0]


ELASTIC: dict[str, Callable[[Any], Any]] = {
    "ssgd": lambda comm: jax_programs.chained(optimizers.synchronous_sgd(comm), jax_programs.SGD),
    "sma": lambda comm: jax_programs.chained(jax_programs.SGD, optimizers.sma(comm, 1.0)),
    "ea-sgd": lambda comm: jax_programs.chained(jax_programs.SGD, optimizers.elastic_averaging(comm, 0.4)),
    "diloco": lambda comm: jax_programs.chained(jax_programs.SGD, optimizers.diloco(comm, every=2)),
}


@pytest.mark.parametrize("kind", ELASTIC)
def test_transformations_follow_a_rank_that_joins(kind: str) -> None:
    """α = 0.4 is valid for two ranks; a third one makes the same transformation, and all follow."""
    with testing.sync_world(2, elastic=True, timeout=60) as comms:
        joined: list[threading.Thread] = []
        found: list[Any] = []

        def main(comm: Any) -> Any:
            way, params = ELASTIC[kind](comm), {"w": jnp.zeros(3)}
            state = State(
                params=PerRank(params, "mean"), optimizer=PerRank(way.init(params), "mean"), number=0, since=0
            )
            with Elastic(comm, state) as elastic:
                for _ in elastic.steps(ElasticSampler(1 << 12, 1)):
                    if comm.rank == 0 and state.number == 3:
                        joined.append(threading.Thread(target=lambda: found.append(main(comms.join(9)))))
                        joined[0].start()
                    gradients = {"w": state.params["w"] - float(comm.rank)}
                    updates, state.optimizer = way.update(gradients, state.optimizer, state.params)
                    state.params = {"w": state.params["w"] + updates["w"]}
                    state.number += 1
                    state.since += comm.size == 3
                    if state.since == 5:
                        return jax.tree.leaves(state.optimizer), state.params
            raise AssertionError("the steps have ended")

        ended = testing.run_threads(list(comms), main)
        joined[0].join()
        for mine, params in (ended[1], found[0]):
            for x, other in zip(mine, ended[0][0], strict=True):
                assert np.array_equal(x, other)
            assert kind != "ssgd" or np.array_equal(params["w"], ended[0][1]["w"])


def test_compiled_transformation_of_an_elastic_job() -> None:
    with testing.sync_world(1, elastic=True) as (comm,):
        way = optimizers.elastic_averaging(comm, 0.5)
        state = jax.jit(way.init)(jnp.zeros(2))
        updates, state = jax.jit(way.update)(jnp.zeros(2), state, jnp.ones(2))
        assert updates.tolist() == [-0.5, -0.5]
        assert state.center.tolist() == [0.5, 0.5]
