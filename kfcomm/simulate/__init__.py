"""The same core machines over simulated links, in virtual time: how long a strategy takes on a network."""

from kfcomm.simulate.network import Host, Link, Local, Network, Switch

__all__ = ["Host", "Link", "Local", "Network", "Switch"]
