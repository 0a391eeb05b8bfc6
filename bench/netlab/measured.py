"""Topologies from measurement, as strategies of the worker, which calls these before the first step."""

from __future__ import annotations

import kfcomm
from kfcomm.strategies import Strategy


async def packed_trees(comm: kfcomm.Communicator) -> Strategy:
    """Trees that fill the ports as they were measured."""
    return (await comm.probe()).packed_trees()


async def minimum_spanning_tree(comm: kfcomm.Communicator) -> Strategy:
    """The tree of least measured latency."""
    return (await comm.probe()).minimum_spanning_tree()
