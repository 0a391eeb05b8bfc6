"""Routes between two ranks."""

import pytest

from kfcomm.simulate.network import SimulatedNetwork
from kfcomm.simulate.ports import Agenda
from kfcomm.simulate.routes import Routes

TEXT = """\
defaults = { bandwidth = "1 GB/s", latency = "100 us", efficiency = 0.5 }
local = { bandwidth = "5 GB/s", latency = "15 us", memory = "8 GB/s" }
[[host]]
ranks = 2
[[host]]
latency = "300 us"
[[host]]
count = 2
[[link]]
between = ["h0", "h3"]
bandwidth = "2 MB/s"
latency = "5 ms"
[[link]]
between = ["h1", "h2"]
latency = "1 ms"
[[switch]]
hosts = ["h0", "h1"]
uplink = "10 GB/s"
[[switch]]
hosts = ["h2"]
uplink = "20 GB/s"
"""


@pytest.fixture
def routes():
    network = SimulatedNetwork.parse(TEXT)
    return Routes(Agenda(), network, network.layout)  # ranks 0 and 1 on h0, then one on each host


@pytest.mark.parametrize(
    ("ends", "ports", "latency_s"),
    [
        ((0, 1), [("rank 0 local out", 5e9), ("memory of h0", 8e9), ("rank 1 local in", 5e9)], 15e-6),
        ((0, 2), [("h0 out", 5e8), ("h1 in", 5e8)], 200e-6),
        ((2, 1), [("h1 out", 5e8), ("h0 in", 5e8)], 200e-6),
        ((1, 3), [("h0 out", 5e8), ("switch 0 up", 5e9), ("switch 1 down", 10e9), ("h2 in", 5e8)], 100e-6),
        ((3, 4), [("h2 out", 5e8), ("switch 1 up", 10e9), ("h3 in", 5e8)], 100e-6),
        ((4, 0), [("h3 out", 5e8), ("switch 0 down", 5e9), ("link h3 to h0", 1e6), ("h0 in", 5e8)], 5e-3),
        ((2, 3), [("h1 out", 5e8), ("switch 0 up", 5e9), ("switch 1 down", 10e9), ("h2 in", 5e8)], 1e-3),
    ],
)
def test_the_ports_and_the_latency_of_a_way(routes, ends, ports, latency_s):
    out, into, seconds = routes.between(*ends)
    assert [(one.port.name, one.port.rate) for one in (*out, *into)] == ports
    assert seconds == pytest.approx(latency_s)


def test_a_port_has_one_end_on_each_way(routes):
    assert routes.between(0, 2)[0][0].port is routes.between(1, 3)[0][0].port
    assert routes.between(0, 2)[1][-1].port is routes.between(1, 2)[1][-1].port


def test_ports_are_those_on_a_way(routes):
    assert list(routes.ports()) == []
    routes.between(4, 2)
    routes.between(1, 0)
    names = [port.name for port in routes.ports()]
    assert names == ["h3 out", "h1 in", "switch 0 down", "memory of h0", "rank 1 local out", "rank 0 local in"]


def test_memory_is_without_a_limit_where_none_is_given():
    network = SimulatedNetwork().of_hosts(1, ranks=2)
    out, into, _ = Routes(Agenda(), network, network.layout).between(1, 0)
    assert [one.port.name for one in (*out, *into)] == ["rank 1 local out", "rank 0 local in"]
