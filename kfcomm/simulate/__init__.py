"""The same core machines over simulated links, in virtual time: how long a strategy takes on a network.

`simulate` runs one collective, by default an all_reduce; `simulate_step` several at once, beside compute;
`simulate_run` steps whose hosts change. A `SimulatedNetwork` says what the ranks run on; ``SimulatedNetwork.load``
reads one from a file, ``of_probe`` takes what was measured. `late` draws stragglers. Ranks that are alike are simulated
once, so that 100,000 take seconds.
"""

from kfcomm.simulate.network import Host, Link, Local, PortQueue, SimulatedNetwork, Switch
from kfcomm.simulate.results import CallResult, Result, StepResult, Use
from kfcomm.simulate.runs import HostsJoined, HostsLeft, HostsLost, Pauses, RunStep, simulate_run
from kfcomm.simulate.workload import Await, Call, Compute, parse_workload
from kfcomm.simulate.world import late, num_messages, simulate, simulate_step

__all__ = [
    "Await",
    "Call",
    "CallResult",
    "Compute",
    "Host",
    "HostsJoined",
    "HostsLeft",
    "HostsLost",
    "Link",
    "Local",
    "Pauses",
    "PortQueue",
    "Result",
    "RunStep",
    "SimulatedNetwork",
    "StepResult",
    "Switch",
    "Use",
    "late",
    "num_messages",
    "parse_workload",
    "simulate",
    "simulate_run",
    "simulate_step",
]
