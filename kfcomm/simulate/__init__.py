"""The same core machines over simulated links, in virtual time: how long a strategy takes on a network.

`simulate` runs one all_reduce. A `SimulatedNetwork` says what the ranks run on; ``SimulatedNetwork.load``
reads one from a file.
Thousands of ranks are simulated in minutes, on one processor.
"""

from kfcomm.simulate.network import Host, Link, Local, Queue, SimulatedNetwork, Switch
from kfcomm.simulate.world import Result, Use, num_messages, simulate

__all__ = ["Host", "Link", "Local", "Queue", "Result", "SimulatedNetwork", "Switch", "Use", "num_messages", "simulate"]
