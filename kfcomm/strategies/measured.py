"""Topologies from measurement: what to make of the matrices of ``Communicator.probe``.

One algorithm is one file; this is where they are found together. They are strategies without a name that ``build``
knows, since they need more than a layout; what they give is handed to ``set_strategy`` as it is.
"""

from __future__ import annotations

from kfcomm.strategies.clusters import hosts_of
from kfcomm.strategies.cost import NetworkModel, network_of
from kfcomm.strategies.packed_trees import bound_seconds, packed_trees
from kfcomm.strategies.spanning_tree import minimum_spanning_tree

__all__ = ["NetworkModel", "bound_seconds", "hosts_of", "minimum_spanning_tree", "network_of", "packed_trees"]
