"""Several hosts: a launcher on each, the layout, the choice of the interface, and a cable that is pulled."""

from __future__ import annotations

import json
import signal

import pytest

from bench.netlab import Netlab, even
from bench.netlab.hosts import Host
from kfcomm.errors import CollectiveError, CollectiveTimeout, ConfigError, PeerLost
from tests.launch.launched import command
from tests.processes import roles
from tests.processes.stage import on_hosts, start

pytestmark = pytest.mark.netns


def test_one_launcher_on_each_of_two_hosts() -> None:
    with Netlab(even(2), network="10.77.1.0/24") as lab:
        hosts = lab.hosts
        run = command("run", "-H", "10.77.1.1:2,10.77.1.2:2")
        with on_hosts([host.inside(*run) for host in hosts], 4) as world:
            assert world.do(roles.join) == [[rank, 4, 0, 0, 1, 1] for rank in range(4)]
            listening = world.do(roles.listening)
            assert [each["address"] for each in listening] == ["10.77.1.1", "10.77.1.1", "10.77.1.2", "10.77.1.2"]
            for strategy in ("auto", "binary_tree_star", "multi_star", "ring"):
                world.do(roles.strategy, name=strategy)
                assert len(set(world.do(roles.all_reduce, name="x", elements=100_000))) == 1

            # a cable is pulled, for a while: what needs it ends by timeout, and goes on when the cable is back
            hosts[1].ip("link", "set", "port", "down")
            for call in start(world, roles.all_reduce, name="x", elements=100_000, timeout=2):
                assert "'x'" in call.failure(CollectiveTimeout).message
            hosts[1].ip("link", "set", "port", "up")
            for name in ("x", "y"):
                assert len(set(world.do(roles.all_reduce, name=name, elements=100_000))) == 1
            world.finish()


def test_hosts_that_do_not_reach_each_other_any_more_lose_each_others_ranks() -> None:
    with Netlab(even(2), network="10.77.6.0/24") as lab:
        hosts = lab.hosts
        run = command("run", "--lost-after", "5", "--keep-going", "-H", "10.77.6.1:2,10.77.6.2:2")
        with on_hosts([host.inside(*run) for host in hosts], 4) as world:
            world.do(roles.join)
            world.do(roles.all_reduce, name="x")
            hosts[1].ip("link", "set", "port", "down")
            for rank, call in enumerate(start(world, roles.all_reduce, name="x")):
                failure = call.failure(PeerLost)
                assert (failure.fields["rank"] < 2) == (rank >= 2)
                assert "silent for" in failure.message or "acknowledged nothing" in failure.message


@pytest.mark.parametrize("strategy", ["star", "double_tree"])
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_while_leaves_wait_for_results_is_named(strategy: str, victim: int) -> None:
    with Netlab(even(4, 100e6), network="10.77.7.0/24") as lab:
        run = command("run", "--keep-going", "-H", ",".join(f"{host.address}:1" for host in lab.hosts))
        with on_hosts([host.inside(*run) for host in lab.hosts], 4) as world:
            world.do(roles.join, strategy=strategy)
            assert len(set(world.do(roles.all_reduce, name="x", elements=100_000))) == 1
            # 32 MB take seconds, and have more chunks than a leaf may send before a result has come back
            calls = start(world, roles.all_reduce, name="x", elements=4_000_000)
            before = [_sent_nbytes(host) for host in lab.hosts]
            while any(_sent_nbytes(host) < sent + 2_000_000 for host, sent in zip(lab.hosts, before, strict=True)):
                pass
            world[victim].signal(signal.SIGKILL)
            for rank, call in enumerate(calls):
                if rank != victim:
                    assert call.failure(PeerLost).fields["rank"] == victim


def _sent_nbytes(host: Host) -> int:
    (found,) = json.loads(host.ip("-json", "-statistics", "link", "show", "port"))
    nbytes: int = found["stats64"]["tx"]["bytes"]
    return nbytes


def test_the_interface_goes_by_the_route_unless_it_is_given() -> None:
    with Netlab(even(2), network="10.77.2.0/24") as lab:
        hosts = lab.hosts
        for number, host in enumerate(hosts, start=1):
            host.ip("address", "add", f"192.0.2.{number}/24", "dev", "lo")
        lines = [host.inside("env", f"KFCOMM_RANK={rank}") for rank, host in enumerate(hosts)]
        with on_hosts(lines, 2, size="2", store="http://10.77.2.1:29700") as world:
            for call in world.start(roles.join, interface="203.0.113.0/24"):
                message = call.failure(ConfigError).message
                assert "203.0.113.0/24" in message
                assert "port 10.77.2." in message
            for interface in (None, "10.77.2.0/24", "port"):
                assert world.do(roles.join, interface=interface) == [[0, 2, 0, 1], [1, 2, 0, 1]]
                assert [each["address"] for each in world.do(roles.listening)] == ["10.77.2.1", "10.77.2.2"]
                assert len(set(world.do(roles.all_reduce, name="x"))) == 1
                world.do(roles.leave)
            # an address that exists, but that the other host has no way to: nothing can be sent there
            world.do(roles.join, interface="192.0.2.0/24", timeout=2)
            for call in world.start(roles.all_reduce, name="x"):
                assert "'x'" in call.failure(CollectiveError).message
            world.do(roles.leave)
