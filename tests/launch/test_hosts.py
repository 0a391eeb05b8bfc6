import pytest

from kfcomm.errors import ConfigError
from kfcomm.launch.hosts import HostPlan, LaunchHost, parse_hosts, plan_for

TWO = (LaunchHost("10.0.0.1", 4), LaunchHost("10.0.0.2", 2))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("10.0.0.1:4,10.0.0.2:2", TWO),
        (" 10.0.0.1:4 , 10.0.0.2:2", TWO),
        ("10.0.0.1", (LaunchHost("10.0.0.1", 1),)),
        ("[fd00::1]:3,[fd00::2]", (LaunchHost("fd00::1", 3), LaunchHost("fd00::2", 1))),
        ("localhost:2", (LaunchHost("127.0.0.1", 2),)),
    ],
)
def test_lists_of_hosts(text: str, hosts: tuple[LaunchHost, ...]) -> None:
    assert parse_hosts(text)[0].num_ranks == hosts[0].num_ranks
    if "localhost" not in text:
        assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:x", "10.0.0.1:-1", "fd00::1:4", "10.0.0.1:4,,", ":4"]
)
def test_a_malformed_entry_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must look like"):
        parse_hosts(text)


def test_a_host_stands_there_once() -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_hosts("10.0.0.1:2,10.0.0.1:2")


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        parse_hosts("no-such-host.invalid:2")


def test_the_order_of_hosts_gives_the_ranks() -> None:
    first, second = HostPlan(TWO, 0), HostPlan(TWO, 1)
    assert first.size == second.size == 6
    assert list(first.ranks) == [0, 1, 2, 3]
    assert list(second.ranks) == [4, 5]
    assert second.address == "10.0.0.2"


def test_each_host_finds_its_own_entry() -> None:
    hosts = parse_hosts("198.51.100.1:4,127.0.0.1:2")
    assert plan_for(hosts).here == 1
    assert plan_for(hosts, "198.51.100.1").here == 0


def test_no_entry_of_this_host() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*198\.51\.100\.1"):
        plan_for(parse_hosts("198.51.100.1:4"))


def test_two_entries_of_this_host() -> None:
    with pytest.raises(ConfigError, match="--self"):
        plan_for((LaunchHost("127.0.0.1", 1), LaunchHost("127.0.0.1", 1)))
