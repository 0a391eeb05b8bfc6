"""Time until the survivors have the result of a call during which a host vanishes.

    python -m bench.netlab.vanishing --rounds 10 --output bench/results/vanishing.json

Five hosts over TCP, one rank each, ``lost_after`` of a second. A host's cable is pulled at the switch, so that no
rank is notified. From then on until the slowest of the others has the sum that it was no part of.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import click

from bench.netlab import Netlab, even
from bench.netlab.tools import NetlabError

HOSTS = 5
LOST_AFTER_S, REACH_S = 1.0, 1.5
_GIVE_UP_S = 120.0
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

folder, x = Path(sys.argv[1]), np.ones(int(sys.argv[2]) // 4, np.float32)
state = State(without=0)
with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, state) as elastic:
    found_s = None
    for step in elastic.steps(ElasticSampler(1000, 1, seed=None), passes=1 << 30):
        handle = comm.all_reduce_async(x, name="g")
        total = handle.wait()
        assert (total == len(handle.contributors)).all()
        if found_s is None and len(handle.contributors) < 5:
            found_s = time.monotonic()
        if step.number == 20 and comm.rank == 0:
            (folder / "trains").touch()
        state.without += comm.size < 5
        if state.without == 5:
            break
    print("found", found_s, flush=True)
"""


def once(lab: Netlab, chance: Random, folder: Path, nbytes: int) -> float:
    """One job; how long the slowest rank waited after its host's cable was pulled, in seconds.

    Raises:
        NetlabError: the job failed, or did not come to its end.
    """
    marker = folder / "trains"
    marker.unlink(missing_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    rank = [sys.executable, str(folder / "train.py"), str(folder), str(nbytes)]
    options = ["--elastic", "2", "--lost-after", str(LOST_AFTER_S), "--restart-limit", "0"]
    doomed = lab.hosts[chance.randrange(1, HOSTS)].name  # the first host's launcher leads the job
    with lab.start([*options, *rank]) as program:
        until_s = time.monotonic() + _GIVE_UP_S
        while not marker.exists():
            if program.wait_for(0.01) or time.monotonic() > until_s:
                raise NetlabError("the job did not begin")
        time.sleep(chance.random() * 0.1)
        pulled_s = time.monotonic()
        lab.partition([doomed])
        try:
            program.wait_for(_GIVE_UP_S)
        finally:
            lab.heal()
        outcome = program.wait(_GIVE_UP_S)
    said = [outcome.output[host.name] for host in lab.hosts if host.name != doomed]
    found = [float(text) for text in re.findall(r"\] found ([0-9.]+)$", "\n".join(said), re.MULTILINE)]
    if len(found) != HOSTS - 1:
        raise NetlabError("\n".join(said))
    return max(found) - pulled_s


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.netlab.vanishing")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of each call")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with Netlab(even(HOSTS), network="10.79.3.0/24") as lab, tempfile.TemporaryDirectory() as folder:
        costs = sorted(once(lab, Random(n), Path(folder), given.nbytes) for n in range(given.rounds))
    median = statistics.median(costs)
    click.echo(f"median {median:.2f} s, worst {costs[-1]:.2f} s, to reach {REACH_S} s")
    if given.output is not None:
        record = {"python": platform.python_version(), "lost_after_s": LOST_AFTER_S, "nbytes": given.nbytes}
        given.output.write_text(json.dumps({**record, "reach_s": REACH_S, "all_s": costs}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
