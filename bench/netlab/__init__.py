"""A test bed of hosts: network namespaces on a bridge, each behind a link of its own rate, for any kfcomm program.

::

    from bench.netlab import Netlab, even

    with Netlab(even(8, rate=200e6)) as lab:
        with lab.start(["python", "train.py"]) as program:
            program.wait_for(10)
            lab.set_rate("h3", 50e6)
            program.wait().check()

``python -m bench.netlab run --hosts 8 --rate 200mbit -- python train.py`` does so from a shell. It takes Linux and the
right to make network namespaces; where something is missing, `NetlabUnavailable` names it.

- `lab`: the bed, from start to end. `hosts`: who is in it. `rates`: what a link lets through.
- `namespaces`, `tools`, `signals`: how it is made and taken away, whatever happens.
- `program`: a kfcomm program across the hosts.
- `worker`, `measure`: a program that times collectives step by step, and who tells it to. `figures`: what is recorded.
"""

from bench.netlab.hosts import Host, HostSpec, even, with_rate
from bench.netlab.lab import Direction, Netlab, why_unavailable
from bench.netlab.namespaces import clean
from bench.netlab.program import Outcome, Program
from bench.netlab.rates import parse_rate, show_rate
from bench.netlab.tools import NetlabError, NetlabUnavailable

__all__ = [
    "Direction",
    "Host",
    "HostSpec",
    "Netlab",
    "NetlabError",
    "NetlabUnavailable",
    "Outcome",
    "Program",
    "clean",
    "even",
    "parse_rate",
    "show_rate",
    "why_unavailable",
    "with_rate",
]
