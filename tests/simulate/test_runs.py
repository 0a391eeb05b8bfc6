"""Runs whose hosts are lost, leave or join."""

from dataclasses import replace

import pytest

from kfcomm.errors import ConfigError
from kfcomm.simulate import (
    Await,
    Call,
    Compute,
    Host,
    HostsJoined,
    HostsLeft,
    HostsLost,
    Pauses,
    SimulatedNetwork,
    simulate_run,
    simulate_step,
)

MIB = 1 << 20
NETWORK = SimulatedNetwork(default=Host("", 1e8)).of_hosts(5)
WORKLOAD = [Compute(0.2), Call(8 * MIB, "a"), Compute(0.2), Call(8 * MIB, "b")]


def whole(hosts, workload=WORKLOAD, **options):
    network = NETWORK.of_hosts(hosts) if hosts >= 5 else replace(NETWORK, hosts=NETWORK.hosts[:hosts])
    return simulate_step(workload, network.layout, network, **options)


def test_a_calm_run_repeats_its_step():
    steps = simulate_run(WORKLOAD, NETWORK, 3, strategy="ring")
    due = whole(5, strategy="ring").seconds
    assert [step.seconds for step in steps] == [due] * 3
    assert [step.begin_s for step in steps] == pytest.approx([0, due, 2 * due])
    assert {(step.size, step.pause_s, step.change, step.graphs) for step in steps} == {(5, 0, "", ("ring",))}


def test_a_killed_host_repeats_what_was_under_way():
    pauses = Pauses()
    calm = whole(5, strategy="ring")
    under_way_s = (calm.calls[0].posted_s + calm.calls[0].done_s) / 2
    steps = simulate_run(WORKLOAD, NETWORK, 3, [HostsLost(1, ("h4",), under_way_s)], strategy="ring")
    before, lossy, after = steps
    assert (before.size, lossy.size, after.size) == (5, 4, 4)
    assert (lossy.pause_s, lossy.repeated, lossy.change) == (pauses.loss_s, 1, "h4 lost")
    assert after.seconds == whole(4, strategy="ring").seconds
    assert before.seconds < lossy.seconds < before.seconds + under_way_s + pauses.loss_s


def test_compute_goes_on_until_a_rank_waits():
    workload = [Call(MIB, "a"), Compute(1.0), Await(), Compute(0.5)]
    # complete before the loss: 1.3 s of compute are left when it is noticed, of which 0.4 pass until calls go on
    lost = HostsLost(0, ("h4",), 0.2)
    (step,) = simulate_run(workload, NETWORK, 1, [lost], strategy="ring", pauses=Pauses(loss_s=0.4))
    assert step.repeated == 0
    assert step.seconds == pytest.approx(1.5)
    (step,) = simulate_run(workload, NETWORK, 1, [replace(lost, at_s=1e-4)], strategy="ring", pauses=Pauses(loss_s=3))
    assert step.repeated == 1
    again = whole(4, [Call(MIB)], strategy="ring").seconds
    assert step.seconds == pytest.approx(3 + 1e-4 + again + 0.5)


def test_a_silent_host_is_noticed_late():
    (killed,) = simulate_run(WORKLOAD, NETWORK, 1, [HostsLost(0, ("h1",), 0.1)])
    (silent,) = simulate_run(WORKLOAD, NETWORK, 1, [HostsLost(0, ("h1",), 0.1, is_silent=True)])
    assert silent.pause_s == pytest.approx(killed.pause_s + 0.9 * 30)
    # meanwhile ranks compute what they can
    assert killed.seconds + 26 < silent.seconds < killed.seconds + 27.001
    quick = Pauses(silence_s=1.0)
    (soon,) = simulate_run(WORKLOAD, NETWORK, 1, [HostsLost(0, ("h1",), 0.1, is_silent=True)], pauses=quick)
    assert soon.seconds < silent.seconds - 25


def test_a_loss_after_the_step_costs_the_pause_alone():
    (step,) = simulate_run(WORKLOAD, NETWORK, 1, [HostsLost(0, ("h1",), 99.0)])
    assert (step.size, step.repeated) == (4, 0)
    assert step.seconds == pytest.approx(whole(5).seconds + Pauses().loss_s)


def test_hosts_leave_and_join_at_boundaries():
    new = Host("new", 1e8, ranks=2)
    changes = [HostsLeft(1, ("h0", "h3")), HostsJoined(3, (new,))]
    steps = simulate_run(WORKLOAD, NETWORK, 4, changes, strategy="auto", state_nbytes=10**8)
    assert [step.size for step in steps] == [5, 3, 3, 5]
    assert [step.num_hosts for step in steps] == [5, 3, 3, 4]
    assert [step.change for step in steps] == ["", "h0, h3 left", "", "new joined"]
    left, joined = steps[1], steps[3]
    assert left.seconds == pytest.approx(whole(3).seconds + Pauses().leave_s)
    # two ranks receive 100 MB each through one port of 100 MB/s
    assert joined.transfer_s == pytest.approx(2.0)
    assert joined.seconds > 2.0 + Pauses().join_s + 0.4


def test_a_slow_host_that_leaves_makes_steps_faster():
    slow = replace(NETWORK, hosts=(*NETWORK.hosts[:4], replace(NETWORK.hosts[4], bandwidth=1e7)))
    before, after = simulate_run(WORKLOAD, slow, 2, [HostsLost(0, ("h4",), 99.0)])
    assert after.seconds < before.seconds / 2
    assert after.as_json()["seconds"] == after.seconds


def test_hosts_stay_behind_their_switch():
    network = SimulatedNetwork.parse('[switch]\nhosts = 2\nuplink = "1 Gbit/s"').of_hosts(6)
    run = simulate_run([Call(MIB)], network, 2, [HostsLeft(1, ("h0",))], strategy="ring")
    same = SimulatedNetwork.parse(
        '[[host]]\ncount = 6\n[[switch]]\nhosts = ["h0", "h1"]\nuplink = "1 Gbit/s"\n[[switch]]\nhosts = ["h2", "h3"]\n'
        'uplink = "1 Gbit/s"\n[[switch]]\nhosts = ["h4", "h5"]\nuplink = "1 Gbit/s"'
    )
    same = replace(same, efficiency=network.efficiency)
    due = simulate_run([Call(MIB)], same, 2, [HostsLeft(1, ("h0",))], strategy="ring")
    assert [step.seconds for step in run] == [step.seconds for step in due]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([HostsLost(3, ("h0",))], "a change in step 3: the run has steps 0..2"),
        ([HostsLost(0, ("h9",))], "host 'h9' is not in the run; these are: h0, h1, h2, h3, h4"),
        ([HostsLeft(0, ("h0",)), HostsLeft(1, ("h0",))], "host 'h0' is not in the run"),
        ([HostsLeft(0, ("h0", "h1", "h2", "h3"))], "less than two ranks are left"),
        ([HostsJoined(0, (Host("h0"),))], "host 'h0' cannot join"),
        ([HostsLost(0, ("h0",), -1)], "a loss -1 s into a step"),
        ([HostsLost(0, ("h0",)), HostsLost(0, ("h1",))], "two losses in step 0"),
    ],
)
def test_wrong_changes(changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate_run(WORKLOAD, NETWORK, 3, changes)


def test_wrong_runs():
    with pytest.raises(ConfigError, match="a run of 0 steps: expected at least 1"):
        simulate_run(WORKLOAD, NETWORK, 0)
    with pytest.raises(ConfigError, match="a state of -1 bytes"):
        simulate_run(WORKLOAD, NETWORK, 1, state_nbytes=-1)
    with pytest.raises(ConfigError, match="at least one call"):
        simulate_run([Compute(1.0)], NETWORK, 1)
