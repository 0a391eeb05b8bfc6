"""Worlds in virtual time: chance has a seed, faults are planned, and a run is the same every time.

All ranks live on one event loop. Its clock advances only when all of them wait, to the next moment at which something
is due. The duration of each message is drawn from the seed, so that seeds try orders of events. This is deterministic
simulation as FoundationDB does it (Zhou et al., SIGMOD 2021, section 4): the real code runs, except for the network,
the clock and the store below it.

`events` are faults and requests, `network` is the clock and the links, `world` joins them with control planes and a
store. `run` runs a program there, and searches for seeds under which it fails.

Not in these worlds: sockets, processes, and the threads of blocking calls.
"""
