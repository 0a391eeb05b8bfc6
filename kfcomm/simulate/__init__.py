"""The same core machines over simulated links, in virtual time: how long a strategy takes on a network.

`simulate` runs one collective, by default an all_reduce. A `SimulatedNetwork` says what the ranks run on;
``SimulatedNetwork.load`` reads one from a file, ``of_probe`` takes what was measured. `late` draws stragglers.
Ranks that are alike are simulated once, so that 100,000 take seconds.
"""

from kfcomm.simulate.network import Host, Link, Local, PortQueue, SimulatedNetwork, Switch
from kfcomm.simulate.world import Result, Use, late, num_messages, simulate

__all__ = [
    "Host",
    "Link",
    "Local",
    "PortQueue",
    "Result",
    "SimulatedNetwork",
    "Switch",
    "Use",
    "late",
    "num_messages",
    "simulate",
]
