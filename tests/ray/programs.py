"""Drivers of jobs on Ray, each with a cluster of its own: ``python -m tests.ray.programs NAME FOLDER``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import kfcomm
import kfcomm.ray
from kfcomm.elastic import Elastic, ElasticSampler, State
from tests.drivers import drive, raised

STEPS = 20_000
KILLED = 20
"""The step in which a node goes."""


@contextlib.contextmanager
def cluster(*num_cpus: int) -> Iterator[tuple[Any, list[Any]]]:
    """The cluster, with a node for each number of CPUs, and its nodes but for the driver's."""
    system = {"health_check_period_ms": 500, "health_check_failure_threshold": 2, "health_check_initial_delay_ms": 0}
    first = {"num_cpus": num_cpus[0], "include_dashboard": False, "_system_config": system}
    made = Cluster(initialize_head=True, head_node_args=first)
    ray.init(address=made.address)  # at the first node: Ray would choose any of those that are on this host
    others = [made.add_node(num_cpus=count) for count in num_cpus[1:]]
    try:
        yield made, others
    finally:
        ray.shutdown()
        made.shutdown()


def all_free(num_cpus: int) -> None:
    """Wait until a job has returned its places."""
    while ray.available_resources().get("CPU", 0) != num_cpus:
        time.sleep(0.05)


def results(_: Path) -> Any:
    """Blocking and asynchronous functions, large arguments, printed lines, worlds of one."""

    def blocking(comm: Any, x: Any, word: str) -> Any:
        print(f"{word} from rank {comm.rank}")
        return (
            comm.rank,
            type(comm).__module__,
            float(comm.all_reduce(x * comm.rank)[0]),
            ray.get_runtime_context().get_node_id(),
        )

    async def asynchronous(comm: Any) -> Any:
        return comm.rank, type(comm).__module__, float((await comm.all_reduce(np.ones(3)))[0])

    class Called:
        async def __call__(self, comm: Any) -> Any:
            return (await comm.all_gather_object(comm.rank))[::-1]

    with cluster(2, 2):
        found = kfcomm.ray.run(blocking, np.ones(1 << 20), "hello", num_workers=4)
        told = [row[:3] for row in found], len({row[3] for row in found})

        async def in_a_loop() -> Any:
            return kfcomm.ray.run(asynchronous, num_workers=2, strategy="ring")

        return {
            "blocking": told,
            "asynchronous": asyncio.run(in_a_loop()),
            "called": kfcomm.ray.run(Called(), num_workers=3, resources_per_worker={"CPU": 0.5}),
            "alone": kfcomm.ray.run(asynchronous, num_workers=1),
        }  # fmt: skip


def failures(_: Path) -> Any:
    """Errors of ranks, and how the culprit is chosen."""

    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fails(comm: Any, rank: int, is_odd: bool = False) -> None:
        if comm.rank == rank:
            raise Odd(1, 2) if is_odd else ZeroDivisionError("here")
        comm.barrier()

    def leaves(comm: Any, code: int) -> None:
        import os
        import signal

        if comm.rank == 1:
            sys.exit(code) if code >= 0 else os.kill(os.getpid(), signal.SIGKILL)
        if code:
            comm.barrier()

    def gives(_: Any) -> Any:
        return threading.Lock()

    with cluster(3):
        return {
            "raises": raised(lambda: kfcomm.ray.run(fails, 2, num_workers=3)),
            "odd": raised(lambda: kfcomm.ray.run(fails, 0, True, num_workers=2)),
            "exits": raised(lambda: kfcomm.ray.run(leaves, 3, num_workers=2)),
            "exits well": raised(lambda: kfcomm.ray.run(leaves, 0, num_workers=2)),
            "is killed": raised(lambda: kfcomm.ray.run(leaves, -9, num_workers=2)),
            "result": raised(lambda: kfcomm.ray.run(gives, num_workers=1)),
        }


def refusals(_: Path) -> Any:
    """Refused arguments and clusters."""
    lock = threading.Lock()

    def function(comm: Any) -> Any:
        return comm.rank

    def other(comm: Any) -> Any:
        return lock

    def run(*args: Any, **options: Any) -> Any:
        return raised(lambda: kfcomm.ray.run(*args, **{"num_workers": 1, **options}))

    found = {"no Ray": run(function)}
    with cluster(2):
        found |= {
            "too few": run(function, num_workers=3, place_within=1),
            "no such": run(function, resources_per_worker={"CPU": 1, "TPU": 4}, place_within=1),
            "unpicklable": run(other),
            "setting": run(function, stratgy="ring"),
            "own": run(function, store="http://10.0.0.1:1"),
            "not callable": run(3),
            "workers": run(function, num_workers=0),
            "elastic": run(function, num_workers=9, elastic=(1, 4)),
            "bounds": run(function, elastic=4),
            "resources": run(function, resources_per_worker={"CPU": -1}),
            "none": run(function, resources_per_worker={}),
        }
        all_free(2)
        from kfcomm.launch import remote

        remote.versions = lambda: ("9.9", 99)
        return found | {"versions": run(function)}


def node(folder: Path) -> Any:
    """A node is killed in an all_reduce; the others finish it, and new workers join on another node."""
    logging.basicConfig(level="INFO")

    def train(comm: Any, doomed: str) -> Any:
        state = State(total=np.zeros(1), sizes=[])
        with Elastic(comm, state) as elastic:
            for step in elastic.steps(ElasticSampler(4 * STEPS, 4)):
                mine = comm.births[comm.rank]
                if step.number == KILLED:
                    (folder / str(mine)).touch()
                    if ray.get_runtime_context().get_node_id() == doomed:
                        time.sleep(600)  # it is killed here: the others wait in the call
                handle = comm.all_reduce_async(np.ones(1 << 16), name="x")
                seen = handle.result()
                if step.number == KILLED:
                    state.total[0] = seen[0]
                state.sizes = [*state.sizes[-9:], comm.size]
                time.sleep(0.01)
                if step.number > KILLED and comm.size == 4 and max(comm.births) > 3:
                    break
        return comm.births, float(state.total[0]), state.sizes, elastic.num_changes

    with cluster(2, 2) as (made, others), ThreadPoolExecutor(1) as pool:
        run = partial(kfcomm.ray.run, train, others[0].node_id, num_workers=4, elastic=(2, 4), timeout=60)
        found = pool.submit(run)
        while len(list(folder.iterdir())) < 4 and not found.done():
            time.sleep(0.01)
        time.sleep(0.5)  # the others are in the call by now, or come to it
        made.remove_node(others[0], allow_graceful=False)
        made.add_node(num_cpus=2)
        return found.result()


def unserved(_: Path) -> Any:
    """The actor of the store is lost."""

    def train(comm: Any) -> None:
        with Elastic(comm, State(total=np.zeros(1))) as elastic:
            for step in elastic.steps(ElasticSampler(4 * STEPS, 4)):
                if comm.rank == 0 and step.number == KILLED:
                    (named,) = ray.util.list_named_actors(all_namespaces=True)
                    ray.kill(ray.get_actor(**named))
                comm.barrier("step")
                time.sleep(0.01)

    with cluster(2):
        found = raised(lambda: kfcomm.ray.run(train, num_workers=2, elastic=(1, 2)))
        all_free(2)
        return found


def sizes(_: Path) -> Any:
    """More workers are asked of Ray, then fewer; one is replaced."""

    def train(comm: Any) -> Any:
        wanted = [3, 1]
        state = State(seen=[])
        with Elastic(comm, state) as elastic:
            for step in elastic.steps(ElasticSampler(4 * STEPS, 4)):
                comm.barrier("step")
                if not state.seen or state.seen[-1] != comm.size:
                    state.seen = [*state.seen, comm.size]
                if comm.rank == 0 and step.number == 5:
                    comm.propose_size(3)
                if comm.rank == 0 and comm.size == 3 and wanted == [3, 1]:
                    comm.propose_size(wanted.pop())
                if 3 in state.seen and comm.size == 1:
                    break
                time.sleep(0.01)
        return comm.births, state.seen

    with cluster(3):
        found = kfcomm.ray.run(train, num_workers=2, elastic=(1, 3))
        all_free(3)
        return found


if __name__ == "__main__":
    drive(globals())
