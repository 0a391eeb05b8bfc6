"""The network file: its meaning, and the errors about wrong files."""

import pytest

from kfcomm.errors import ConfigError
from kfcomm.simulate.fields import parse_rate, parse_time_s
from kfcomm.simulate.network import TCP_EFFICIENCY, Host, Link, PortQueue, SimulatedNetwork, Switch
from kfcomm.strategies import cost

FULL = """\
[defaults]
bandwidth = "200 Mbit/s"   # each way
latency = "100 us"
ranks = 2

[local]
bandwidth = "5 GB/s"
latency = "15 us"
overhead = "20 us"
fold = "10 GB/s"
copy = "2 GB/s"
memory = "40 GB/s"
cpus = 4

[testbed]
cpus = 3
burst = 16000

[[host]]
name = "slow"
bandwidth = "50 Mbit/s"
ranks = 1

[[host]]
count = 2

[[link]]
between = ["slow", "h2"]
latency = "5 ms"

[[switch]]
hosts = ["slow", "h1"]
uplink = "1 Gbit/s"
"""


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200 Mbit/s", 25e6),
        ("10 Gbit/s", 1.25e9),
        ("5 GB/s", 5e9),
        ("1.5kB/s", 1500.0),
        ("512 MiB/s", float(1 << 29)),
        ("8 bit/s", 1.0),
    ],
)
def test_a_rate_is_in_bytes_per_second(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "time_s"), [("100 us", 1e-4), ("100 µs", 1e-4), ("0.5ms", 5e-4), ("2 s", 2.0)])
def test_a_time_is_in_seconds(text, time_s):
    assert parse_time_s(text) == time_s


@pytest.mark.parametrize("text", ["200 Mbit", "fast", "", "5 Gb/s", "0 bit/s", "-1 bit/s", 200, None])
def test_no_rate(text):
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["100", "1 min", "-1 s", 1e-4])
def test_no_time(text):
    with pytest.raises(ValueError, match="time"):
        parse_time_s(text)


def test_a_file_says_all_that_there_is():
    network = SimulatedNetwork.parse(FULL)
    slow = Host("slow", 6.25e6, 1e-4, ranks=1, cpus=4)
    assert network.hosts == (slow, Host("h1", 25e6, 1e-4, 2, 4), Host("h2", 25e6, 1e-4, 2, 4))
    assert network.links == (Link(("slow", "h2"), None, 5e-3),)
    assert network.switches == (Switch(("slow", "h1"), 125e6),)
    assert (network.local.overhead_s, network.local.fold, network.local.copy) == (2e-5, 1e10, 2e9)
    assert (network.local.memory, network.cpus, network.burst_nbytes) == (4e10, 3, 16000)
    assert network.efficiency == TCP_EFFICIENCY
    assert network.layout.hosts == (0, 1, 1, 2, 2)
    assert network.layout.num_cpus == 4
    assert [network.switch_of(host) for host in range(3)] == [0, 0, None]


def test_an_empty_file_is_the_network_of_the_cost_model():
    default = SimulatedNetwork.parse("").default
    costs = cost.NetworkModel()
    assert default.bandwidth == 1 / costs.cross_beta_s_per_byte
    assert default.latency_s == costs.cross_alpha_s
    assert SimulatedNetwork().efficiency == 1.0


def test_queues_are_drop_tail_unless_they_are_fair():
    assert SimulatedNetwork.parse("").queue is PortQueue.TAIL
    assert SimulatedNetwork.parse('defaults.queue = "fair"').queue is PortQueue.FAIR


def test_hosts_that_are_not_listed_are_like_the_default():
    network = SimulatedNetwork.parse(FULL).of_hosts(5)
    assert [host.name for host in network.hosts] == ["slow", "h1", "h2", "h0", "h3"]
    assert [host.ranks for host in network.hosts] == [1, 2, 2, 2, 2]
    assert {host.ranks for host in SimulatedNetwork.parse(FULL).of_hosts(3, ranks=8).hosts} == {8}


def test_switches_of_equally_many_hosts():
    network = SimulatedNetwork.parse('[switch]\nhosts = 2\nuplink = "1 GB/s"').of_hosts(5)
    assert [network.switch_of(host) for host in range(5)] == [0, 0, 1, 1, 2]
    assert network.uplink_of(2) == 1e9


def test_too_many_hosts_are_listed():
    with pytest.raises(ConfigError, match="2 hosts are too few: the network lists 3"):
        SimulatedNetwork.parse(FULL).of_hosts(2)


def test_no_hosts_at_all():
    with pytest.raises(ConfigError, match="--hosts 8x1"):
        SimulatedNetwork.parse("").of_hosts()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[host]]\n\nbandwidth = "200 Mbit"',
            "net.toml:3: host.bandwidth: expected a rate, got '200 Mbit'; write",
        ),
        ('[[host]]\n[[host]]\nbandwith = "1 bit/s"', "net.toml:3: host.bandwith: is unknown; did you mean bandwidth?"),
        ("[default]", "net.toml:1: default: is unknown; did you mean defaults?"),
        ("# a\n[defaults\n", "net.toml:2: Expected ']'"),
        ('[local]\nlatency = "1', "net.toml:2: "),
        ('a = "', "net.toml:1: "),
        ("host = 3", "net.toml:1: host: must be tables"),
        ("[[defaults]]", "net.toml:1: defaults: must be one table"),
        ("[local]\ncpus = -1", "net.toml:2: local.cpus: expected a whole number of at least 0, got -1"),
        ("[defaults]\nranks = true", "net.toml:2: defaults.ranks: expected a whole number of at least 1, got True"),
        ("[local]\noverhead = 10", "net.toml:2: local.overhead: expected a time, got 10"),
        (
            "[defaults]\nefficiency = 2",
            "net.toml:2: defaults.efficiency: expected a number above 0 and at most 1",
        ),
        ('[defaults]\nqueue = "red"', "net.toml:2: defaults.queue: expected tail or fair, got 'red'"),
        ("[[host]]\nname = 3", "net.toml:2: host.name: expected a name, got 3"),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"', "net.toml:4: host.name: 'a' is the name of another host"),
        ('[[link]]\nbetween = ["a", "b"]', "net.toml:2: link.between: expected a host of this file, got 'a'"),
        ("[[link]]\n", "net.toml:1: link.between: is missing"),
        ('[[host]]\ncount = 2\n[[link]]\nbetween = ["h0", "h0"]', "net.toml:4: link.between: .* is not two hosts"),
        ('[[host]]\ncount = 2\n[[link]]\nbetween = ["h0", "h1"]', "net.toml:3: link.bandwidth: is missing"),
        ('[switch]\nuplink = "1 GB/s"', "net.toml:1: switch.hosts: is missing"),
        ("[[host]]\n[[switch]]\nhosts = ['h0']", "net.toml:2: switch.uplink: is missing"),
        ("[[switch]]\nhosts = 'h0'", "net.toml:2: switch.hosts: expected a list of names, got 'h0'"),
        (
            "[[host]]\n" + "[[switch]]\nhosts = ['h0']\nuplink = '1 GB/s'\n" * 2,
            "net.toml:6: switch.hosts: 'h0' is behind a switch already",
        ),
        ("defaults = { ranks = 0 }", "net.toml:1: defaults.ranks: expected a whole number of at least 1, got 0"),
        ("defaults.ranks = 0", "net.toml: defaults.ranks: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_malformed_file_names_line_and_field(text, message):
    with pytest.raises(ConfigError, match=f"^{message}".replace("[", r"\[").replace("?", r"\?")):
        SimulatedNetwork.parse(text, "net.toml")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml' cannot be read"):
        SimulatedNetwork.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        SimulatedNetwork.load(tmp_path / "binary.toml")
