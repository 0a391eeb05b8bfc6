"""Five hosts, partitioned three to two: three train on, two raise an error, and join again later as new ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.netlab import Host, Netlab, even
from tests.launch.launched import TOKEN, environ
from tests.support import free_port

pytestmark = pytest.mark.slow

HOW_LONG_S = 120
LOOK_S = 0.02
"""Between two looks, in which a busy machine can run what they are for."""
PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

LENGTH = 60
folder, rank = Path(sys.argv[1]), int(sys.argv[2])


def train(comm):
    state = State(used=np.zeros(LENGTH), healed=0)
    with comm, Elastic(comm, state) as elastic:
        sampler = ElasticSampler(LENGTH, 10, seed=3)
        for step in elastic.steps(sampler, passes=1 << 30, used_in="used"):
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            state.used += comm.all_reduce(mask, name="used")
            if step.number == 5:
                (folder / f"{rank} trains").touch()
            if comm.size == 3:
                (folder / f"{rank} goes on").touch()
            state.healed += {*comm.births} == {0, 1, 2, 8, 9}
            if state.healed and sampler.left == 0:
                break
            time.sleep(0.01)
        # since a pass began with all hosts, each sample was used as often as any other
        return sorted(comm.births), sorted(set(state.used.tolist()))


try:
    said = train(kfcomm.sync.init(elastic=True))
except kfcomm.Partitioned as error:
    (folder / f"{rank} is cut off").write_text(json.dumps(error.members))
    said = train(kfcomm.sync.init(elastic=True, join=5 + rank))
print(json.dumps(said))
"""


def until(folder: Path, processes: list[subprocess.Popen[str]], names: set[str]) -> None:
    """Wait for these files; no process may end before."""
    while not names <= {one.name for one in folder.iterdir()}:
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(LOOK_S)


def start(host: Host, rank: int, store: str, folder: Path) -> subprocess.Popen[str]:
    """A rank on a host, without a launcher."""
    variables = {"RANK": str(rank), "SIZE": "5", "STORE": store, "TOKEN": TOKEN, "LOST_AFTER": "5", "TIMEOUT": "60"}
    line = host.inside(sys.executable, "-W", "error", str(folder / "train.py"), str(folder), str(rank))
    env = environ(**{f"KFCOMM_{name}": value for name, value in variables.items()})
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.netns
def test_the_lesser_side_comes_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with Netlab(even(5), network="10.77.12.0/24") as lab:
        store = f"http://{lab.hosts[0].address}:{free_port()}"
        ranks = [start(host, rank, store, tmp_path) for rank, host in enumerate(lab.hosts)]
        try:
            until(tmp_path, ranks, {f"{rank} trains" for rank in range(5)})
            lab.partition(["h3", "h4"])
            until(tmp_path, ranks, {f"{rank} goes on" for rank in range(3)} | {"3 is cut off", "4 is cut off"})
            lab.heal()
            ends = [process.communicate(timeout=HOW_LONG_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    assert [process.returncode for process in ranks] == [0] * 5, ends
    for said, _ in ends:
        births, used = json.loads(said)
        assert births == [0, 1, 2, 8, 9]
        assert len(used) == 1
