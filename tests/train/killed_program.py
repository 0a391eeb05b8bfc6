"""Program of an elastic job: seven algorithms and two compressors side by side, each with a model of its own.

Rank 0 asks for four ranks; one of four kills itself; the ranks that are left, and those in its place, train on. Each
writes its models, and the ranks of each step, to a file of the folder that is given.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kfcomm
from kfcomm.compression import PowerSGD, TopK
from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State
from tests.train.reference import RATE, first_model, gradient, matrix
from tests.train.test_changing_ranks import KINDS

GROWS_AT, DIES_AFTER, ENDS_AFTER = 3, 4, 7
"""Step that asks for ranks, steps of four ranks until one dies, and steps from then on."""


def new_state(comm: Any) -> State:
    made = {kind.replace("-", "_"): algorithm.made(comm, first_model(), kind) for kind, (algorithm, _) in KINDS.items()}
    models = {
        f"model_{kind.replace('-', '_')}": PerRank(first_model(), "mean") if algorithm.keeps_replicas else first_model()
        for kind, (algorithm, _) in KINDS.items()
    }
    sums = {"power_sum": np.zeros((8, 9)), "top_sum": np.zeros((8, 9))}
    return State(power=PowerSGD(2, min_rate=1.0), top=TopK(0.1), of_four=0, after=0, log=[], **sums, **made, **models)


def step(comm: Any, state: State) -> None:
    number = len(state.log)
    for kind in KINDS:
        name = kind.replace("-", "_")
        model, way = getattr(state, f"model_{name}"), getattr(state, name)
        pending = way.parameters(model)
        along = way.gradients(gradient(model, number, comm.rank)).wait()
        setattr(state, f"model_{name}", pending.wait() - RATE * along)
    given = {"m": matrix(number, comm.rank)}
    state.power_sum = state.power_sum + state.power.average(comm, given)["m"]
    state.top_sum = state.top_sum + state.top.average(comm, given)["m"]


def main(folder: Path) -> None:
    with kfcomm.sync.init(elastic=True) as comm:
        state = new_state(comm)
        with Elastic(comm, state) as elastic:
            for _ in elastic.steps(ElasticSampler(1 << 16, 1)):
                if len(state.log) == GROWS_AT and comm.rank == 0:
                    comm.propose_size(4)
                if state.of_four == DIES_AFTER and not state.after and comm.rank == 1 and comm.size == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.after += state.of_four >= DIES_AFTER
                state.of_four += comm.size == 4
                step(comm, state)
                state.log = [*state.log, list(comm.births)]
                if state.after == ENDS_AFTER:
                    break
        said = {name: getattr(state, name) for name in ("log", "power_sum", "top_sum")}
        said |= {kind: getattr(state, f"model_{kind.replace('-', '_')}") for kind in KINDS}
        said["left"] = [state.power.errors.of("m"), state.top.errors.of("m")]
        (folder / str(comm.births[comm.rank])).write_bytes(pickle.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
