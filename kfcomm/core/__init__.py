"""Sans-IO core: graphs, frames, machines, and the router that matches collectives by name.

Pure and deterministic: time and randomness are arguments, payload bytes never enter, and nothing waits. The
engine, a test or a simulator feeds it events, and carries out what it decides: see ``machine.CollectiveDriver`` and
``calls.Tell``.

Read in this order:

- ``graph``, ``program``: which part of a buffer travels along which tree, as one rank sees it.
- ``machine``: one collective on one rank, with the table of states of a chunk. ``collective``: the same with a name.
- ``calls``, ``matching``, ``router``: all collectives of a rank, with the table of states of a call.
- ``links``, ``frame``, ``names``, ``signature``: what travels on a data link, and what bounds it.
- ``handshake``, ``auth``: who may connect.
- ``gossip``, ``membership``: the control plane, and who continues after a failure.
- ``deadlines``, ``launch_order``: waiting too long, and one order for libraries that match by order.
"""
