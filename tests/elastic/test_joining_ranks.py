"""Processes that join without a launcher and are rejected: each reports the reason, and the others continue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.launch.launched import TOKEN, environ, finished
from tests.support import free_port

HOW_LONG_S = 120
PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

end, said = map(Path, sys.argv[1:])
state = State(steps=0)
try:
    with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, state) as elastic:
        for step in elastic.steps(ElasticSampler(10, 1), passes=1 << 30):
            if comm.all_reduce(np.array([end.exists()]), name="end", op="or")[0]:
                break
            if comm.size == 3:
                Path(f"{said}.is in").touch()
            time.sleep(0.01)
        said.write_text(json.dumps(list(comm.births)))
except kfcomm.ConfigError as error:
    said.write_text(json.dumps(str(error)))
"""


def test_rejected_joining_rank_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    store, end = f"http://127.0.0.1:{free_port()}", tmp_path / "end"
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, **more: str) -> subprocess.Popen[bytes]:
        variables = {"SIZE": "2", "RANK": "0", "STORE": store, "TOKEN": TOKEN, "TIMEOUT": str(HOW_LONG_S), **more}
        started[name] = subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py"), str(end), str(tmp_path / name)],
            env=environ(**{f"KFCOMM_{key}": value for key, value in variables.items()}),
        )
        return started[name]

    def said(name: str) -> object:
        assert started[name].wait(HOW_LONG_S) == 0
        return json.loads((tmp_path / name).read_text())

    try:
        start("0")
        start("1", RANK="1")
        start("2", JOIN="2")
        while not (tmp_path / "0.is in").exists():
            assert [started[name].poll() for name in ("0", "1", "2")] == [None] * 3
        start("2 again", JOIN="2")
        assert said("2 again") == "another process has joined this job as 2, or waits to: take another number"
        start("3", JOIN="3", CHECKSUM="1")
        why = "the ranks of the job refuse this process: checksum is on for rank 3 and off for rank "
        assert str(said("3")).startswith(why)
        end.touch()
        assert [said(name) for name in ("0", "1", "2")] == [[0, 1, 2]] * 3
    finally:
        for process in started.values():
            process.kill()
            process.wait()


GROWS = """
import sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.rendezvous.client import StoreClient

known = set()


async def get(self, key, timeout_s, plain=StoreClient.get):
    found = await plain(self, key, timeout_s)
    known.update(sys.modules)
    return found


StoreClient.get = get
with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, State(weights=np.ones(1 << 20))) as elastic:
    for step in elastic.steps(ElasticSampler(10, 1), passes=1 << 30):
        if comm.rank == 0 and step.number == 3:
            comm.propose_size(2)
        if comm.all_reduce(np.array([comm.size == 2]), name="end", op="or")[0]:
            break
        time.sleep(0.01)
    if known:
        print(sorted(one for one in set(sys.modules) - known if one.startswith("kfcomm")), flush=True)
"""


def test_joining_rank_imports_nothing_once_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GROWS)
    ended = finished("run", "-n", "1", "--elastic", "1:2", "--", sys.executable, str(tmp_path / "train.py"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("[]"), ended.stdout
