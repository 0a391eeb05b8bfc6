"""Collectives of pytrees: eager, compiled, and differentiated."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kfcomm.jax
import kfcomm.sync
from kfcomm import testing
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.rendezvous.host import interfaces, is_loopback
from tests.launch.launched import environ, finished
from tests.support import free_port

jax = pytest.importorskip("jax")
jnp = jax.numpy

from tests.frameworks import jax_programs  # noqa: E402  it imports JAX

SIZE = 3


@pytest.mark.parametrize("name", ["trees", "gradients", "other_gradients"])
def test_eager(name: str) -> None:
    with testing.sync_world(SIZE) as comms:
        testing.run_threads(comms, lambda comm: jax_programs.PROGRAMS[name](comm, lambda call: call))


def compiled(size: int, *names: str, **variables: str) -> str:
    program = (sys.executable, "-m", "tests.frameworks.jax_programs", *names)
    done = finished("run", "-n", str(size), *program, env=environ(JAX_PLATFORMS="cpu", **variables))
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {name}" for rank in range(size) for name in names)
    return done.stderr


def test_compiled() -> None:
    assert compiled(SIZE, "trees", "gradients", "other_gradients", "many", "loops", "checkpointed") == ""


@pytest.mark.parametrize("number", [2, 5])
def test_ranks_with_several_devices(number: int) -> None:
    assert compiled(2, "devices", XLA_FLAGS=f"--xla_force_host_platform_device_count={number}") == ""


@pytest.mark.parametrize("number", [1, 3])
def test_meshes_of_the_devices_of_all_ranks(number: int) -> None:
    flags = f"--xla_force_host_platform_device_count={number}"
    assert compiled(2, "processes", XLA_FLAGS=flags, COORDINATOR=f"127.0.0.1:{free_port()}") == ""


def test_a_communicator_is_closed_after_the_computations_that_were_begun() -> None:
    assert compiled(2, "left") == ""


def test_an_error_inside_jit_reaches_whoever_called() -> None:
    assert compiled(2, "errors") == ""


def test_an_error_of_an_eager_call_is_ours() -> None:
    def rank(comm: Any) -> None:
        with pytest.raises(KfcommError, match=r"float32 \((2|3),\) on rank (0|1) and float32"):
            kfcomm.jax.all_reduce(jnp.ones(2 + comm.rank), comm)

    with testing.sync_world(2) as comms:
        testing.run_threads(comms, rank)


@pytest.mark.parametrize("is_remote", [False, True])
def test_processes_of_jax_distributed_need_no_variables(is_remote: bool, tmp_path: Path) -> None:
    """Nor a token, where the address of the coordinator is not a loopback address."""
    found = [one.address for one in interfaces() if is_loopback(one.address) != is_remote and ":" not in one.address]
    if not found:
        pytest.skip("needs an address that is not a loopback one")
    with socket.create_server((found[0], 0)) as server:
        port = server.getsockname()[1]
    program = (
        "import sys, jax, numpy as np, kfcomm\n"
        f"jax.distributed.initialize('{found[0]}:{port}', 2, int(sys.argv[1]))\n"
        "for _ in range(2):\n"
        "    with kfcomm.sync.init() as comm:\n"
        "        print(comm.rank, comm.size, comm.all_reduce(np.ones(2))[0])\n"
        "jax.distributed.shutdown()\n"
    )
    ranks = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        folder = tmp_path / str(rank) if is_remote else tmp_path  # else both have the token of their user, in a file
        env = environ(JAX_PLATFORMS="cpu", TMPDIR=str(folder))
        command = [sys.executable, "-c", program, str(rank)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate()[0].split() for rank in ranks]
    assert said == [["0", "2", "2.0"] * 2, ["1", "2", "2.0"] * 2]


def test_in_a_world_of_one_everything_works() -> None:
    with kfcomm.sync.init() as comm:
        for wrap in (jax.jit, lambda call: call):
            jax_programs.loops(comm, wrap)
            assert wrap(lambda x: kfcomm.jax.all_reduce(x, comm))({"a": []}) == {"a": []}


def test_refused_calls() -> None:
    with kfcomm.sync.init() as comm:
        with pytest.raises(ConfigError, match=r"need a communicator of kfcomm.sync, not a Communicator"):
            kfcomm.jax.all_reduce(jnp.ones(2), comm._inner)
        with pytest.raises(ConfigError, match="has a gradient if its op is sum or avg, not max"):
            jax.grad(lambda x: kfcomm.jax.all_reduce(x, comm, op="max").sum())(jnp.ones(2))
        with pytest.raises(NotImplementedError, match="vmap is only supported"):
            jax.vmap(lambda x: kfcomm.jax.all_reduce(x, comm))(jnp.ones((2, 2)))


def test_arrays_are_read_where_they_are() -> None:
    """An eager call copies nothing of what it is given."""
    seen: list[int] = []

    def rank(comm: Any) -> None:
        x = jnp.arange(5000.0)
        verb = comm.all_reduce_many

        def look(given: Any, **options: Any) -> Any:
            seen.extend(map(id, given.values()))
            return verb(given, **options)

        comm.all_reduce_many = look
        kfcomm.jax.all_reduce({"x": x}, comm)
        assert id(x) in seen

    with testing.sync_world(2) as comms:
        testing.run_threads(comms, rank)
